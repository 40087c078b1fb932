"""Cancel an operation at every await, one after another."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

MAX_ITERATIONS = 2000  # of the event loop; an operation that needs more waits for a clock, which hides its awaits


class Attempt:
    """How far the operation got."""

    def __init__(self) -> None:
        self.finished = False  # before it was cancelled
        self.over = False


@asynccontextmanager
async def cancel_after(iterations: int) -> AsyncIterator[Attempt]:
    """Cancel the block after this many iterations of the event loop.

    Every task that suspends is resumed in a later iteration. So all iterations together cover all awaits, those of
    tasks that work for the block included.
    """
    attempt = Attempt()
    loop = asyncio.get_running_loop()

    def count(left: int) -> None:
        if attempt.over:
            return
        if left:
            loop.call_soon(count, left - 1)
        else:
            scope.cancel()

    with anyio.CancelScope() as scope:
        loop.call_soon(count, iterations)
        try:
            yield attempt
            attempt.finished = True
        finally:
            attempt.over = True


async def cancel_at_each_iteration(
    operation: Callable[[], Awaitable[object]], check: Callable[[], Awaitable[None]]
) -> int:
    """Repeat the operation, cancelled one iteration later each time, until it finishes. Check after each.

    Returns how often it was cancelled.
    """
    for iterations in range(MAX_ITERATIONS):
        async with cancel_after(iterations) as attempt:
            await operation()
        await check()
        if attempt.finished:
            return iterations
    raise AssertionError(f"the operation did not finish within {MAX_ITERATIONS} iterations")
