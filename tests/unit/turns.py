"""Cancel an operation at every moment of its life, one after another."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

MOST_TURNS = 2000  # of the event loop; an operation that needs more waits for a clock, and hides its steps


class Cancelled:
    """How far the operation came."""

    def __init__(self) -> None:
        self.finished = False  # it was done before the cancellation came
        self.over = False


@asynccontextmanager
async def cancelled_after(turns: int) -> AsyncIterator[Cancelled]:
    """Cancel the block after so many turns of the event loop.

    Whatever suspends, in whichever task, is resumed in a later turn: all turns together are all awaits, also those of
    tasks that work for the block.
    """
    how = Cancelled()
    loop = asyncio.get_running_loop()

    def count(left: int) -> None:
        if how.over:
            return
        if left:
            loop.call_soon(count, left - 1)
        else:
            scope.cancel()

    with anyio.CancelScope() as scope:
        loop.call_soon(count, turns)
        try:
            yield how
            how.finished = True
        finally:
            how.over = True


async def cancelled_at_each_turn(
    operation: Callable[[], Awaitable[object]], check: Callable[[], Awaitable[None]]
) -> int:
    """Do the operation again and again, cancelled one turn later each time, until it is done before; check each time.

    Returns how many times it was cancelled.
    """
    for turns in range(MOST_TURNS):
        async with cancelled_after(turns) as how:
            await operation()
        await check()
        if how.finished:
            return turns
    raise AssertionError(f"the operation was not done after {MOST_TURNS} turns")
