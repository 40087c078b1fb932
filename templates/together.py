"""Run two parts of a build at the same time."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.lowlevel

from guest.errors import first_error

_First = TypeVar("_First")
_Second = TypeVar("_Second")


async def both(
    first: Callable[[], Awaitable[_First]], second: Callable[[], Awaitable[_Second]]
) -> tuple[_First, _Second]:
    """Run two functions concurrently. If one fails, cancel the other and raise the error without its group."""
    firsts: list[_First] = []

    async def run_first() -> None:
        firsts.append(await first())

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_first)
            result = await second()
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    # A task group that is cancelled from outside can end without an error and without a result; then this raises.
    await anyio.lowlevel.checkpoint_if_cancelled()
    return firsts[0], result
