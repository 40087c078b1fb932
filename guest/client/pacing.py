"""How much of the event loop the reader of one channel takes, however fast its machine sends.

A reader handles frames in short turns and lets all other tasks run in between. A channel that has used more than its
share becomes busy: busy channels take turns among each other, and the loop goes around several times between two of
their turns. So all of them together hold up other work less than one turn each time, however many they are. On a loop
with nothing else to do they lose almost nothing.
"""

import time
from collections.abc import Callable

import anyio
import anyio.lowlevel

TURN_S = 0.0005  # of handling frames; one frame may take longer
BURST_S = 0.005  # a channel that rested gets this much before it is busy: a listing, a page of output
SHARE = 0.1  # of the loop's time that a channel may use without becoming busy
ROUNDS_BETWEEN = 4  # of the loop, between the turns of any two busy channels

_busy_channels = anyio.lowlevel.RunVar[anyio.Lock]("busy_channels")  # one lock for each event loop


class Pace:
    """The turns of one channel."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._turn_began = clock()
        self._used_s = 0.0  # recently: it shrinks by SHARE of the time that passes

    def begin_turn(self) -> None:
        """Start measuring."""
        now = self._clock()
        self._used_s = max(0.0, self._used_s - SHARE * (now - self._turn_began))
        self._turn_began = now

    def turn_is_over(self) -> bool:
        """Return whether other tasks should run before the next frame is handled."""
        return self._clock() - self._turn_began >= TURN_S

    async def next_turn(self) -> None:
        """Let other tasks run, then start another turn."""
        await self.end_turn()
        await anyio.lowlevel.checkpoint()
        self.begin_turn()

    async def end_turn(self) -> None:
        """Stop measuring, and wait for this channel's next turn if it is busy."""
        self._used_s = min(2 * BURST_S, self._used_s + self._clock() - self._turn_began)
        if self._used_s > BURST_S:
            async with _busy_lock():
                for _ in range(ROUNDS_BETWEEN):
                    await anyio.lowlevel.checkpoint()


def _busy_lock() -> anyio.Lock:
    """Return the lock that the busy channels of this event loop pass on in order of arrival."""
    try:
        return _busy_channels.get()
    except LookupError:
        lock = anyio.Lock()
        _busy_channels.set(lock)
        return lock
