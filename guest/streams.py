"""Streams that a machine opens to its host over the agent channel: what both ends agree on.

Every frame of a stream has a header `{"stream": number, "do": …}`:

    open     the machine begins a stream; numbers only grow
    data     the body has bytes
    window   the receiver has used `bytes` of what it got: the sender may send as many more
    end      the sender sends no more
    reset    either side gives the stream up, both ways

A sender may have a window of bytes on the way that the receiver has not used yet, so a stream that is not read holds
up nothing but itself. The host may let windows grow: a window frame may give more than was used.
"""

WINDOW = 192 * 1024  # bytes of a stream that may wait at the host, at first
GUEST_WINDOW = 512 * 1024  # bytes of a stream that may wait in the machine, whose memory it is
CHUNK = 64 * 1024  # bytes of one frame: a stream gives way to the others after each
MAX_STREAMS = 64  # open at the same time in one machine
OPENS_PER_S, OPEN_BURST = 50, 100  # what an agent allows itself; the host tolerates twice as much


class OpenRate:
    """Counts openings against a rate, with the time handed in."""

    def __init__(self, now: float, factor: int = 1) -> None:
        self._rate, self._burst = OPENS_PER_S * factor, OPEN_BURST * factor
        self._left = float(self._burst)
        self._at = now

    def take(self, now: float) -> bool:
        """Count one opening; returns False if there were too many."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Take back the opening that was counted last: there was none."""
        self._left += 1
