"""Streams between a machine and its host over the agent channel: what both ends agree on.

Every frame of a stream has a header `{"stream": number, "do": …}`:

    open     the machine begins a stream; numbers only grow. Or the host does, to `port` on the machine's loopback;
             its numbers are negative and only fall
    opened   the machine has connected a stream of the host
    data     the body has bytes
    window   the receiver has used `bytes` of what it got: the sender may send as many more
    end      the sender sends no more
    reset    either side gives the stream up, both ways

A sender may have a window of bytes on the way that the receiver has not used yet, so a stream that is not read holds
up nothing but itself. All open streams have an equal share of what may be on the way, whichever of them came first.
So the host lets windows grow and shrink: a window frame may give more or less than was used. To the machine the host
sends no more than `guest_window`, and the agent reports what it has used often enough for the least of it.
"""

WINDOW = 192 * 1024  # bytes of a stream that may wait at the host, at first
GUEST_WINDOW = 512 * 1024  # bytes of a stream that may wait in the machine, whose memory it is, if streams are few
GUEST_WINDOWS = 2 * 1024 * 1024  # bytes of all streams together, if they are many
CHUNK = 64 * 1024  # bytes of one frame: a stream gives way to the others after each
LEAST_GUEST_WINDOW = 2 * CHUNK  # one on the way while the other is used
MAX_STREAMS = 64  # open at the same time in one machine
MAX_HOST_STREAMS = 32  # that the host has opened
OPENS_PER_S, OPEN_BURST = 50, 100  # what an agent allows itself; the host tolerates twice as much


def guest_window(count: int) -> int:
    """Return how many bytes of each stream may wait in a machine that has `count` of them open."""
    return min(GUEST_WINDOW, max(LEAST_GUEST_WINDOW, GUEST_WINDOWS // max(1, count)))


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
