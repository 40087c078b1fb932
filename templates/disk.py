"""Keep builds from filling the disk: check what is free before a step, and what is taken while it runs."""

import os
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from guest.errors import first_error
from templates.tools import StepFailed

RESERVE = 512 * 1024**2  # bytes that builds leave free for the rest of the host
MAX_STEP = 64 * 1024**3  # bytes of a step's files; buildah keeps a whole copy of the image for each of its layers
POLL_S = 0.1  # a fast disk takes 200 MB in this time, less than the reserve
MEASURING_SHARE = 50  # measuring many files takes a while: spend at most one part in so many of the time on it
BLOCK = 512  # bytes: the unit of st_blocks

_Result = TypeVar("_Result")


def require_free(folder: Path, needed: int, purpose: str) -> None:
    """Raise StepFailed unless the disk has room for `needed` more bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed + RESERVE:
        raise StepFailed(
            f"{purpose} needs {_size(needed + RESERVE)} of disk space in {folder}, and only {_size(free)} is free"
        )


async def run_bounded(folder: Path, limit: int, too_large: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return the result of `work`. Cancel it and raise StepFailed when `folder` grows too large or the disk is full.

    `folder` need not exist yet, but its parent must.
    """

    async def watch() -> None:
        due = 0.0
        while True:
            _check_free(folder)
            if (started := time.monotonic()) >= due:
                await anyio.to_thread.run_sync(_check_size, folder, limit, too_large)
                due = time.monotonic() + MEASURING_SHARE * (time.monotonic() - started)
            await anyio.sleep(POLL_S)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            result = await work()
            await anyio.to_thread.run_sync(_check_size, folder, limit, too_large)  # what it wrote last
            _check_free(folder)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return result


def _check_size(folder: Path, limit: int, too_large: str) -> None:
    if disk_usage(folder) > limit:
        raise StepFailed(f"{too_large} larger than {_size(limit)}")


def _check_free(folder: Path) -> None:
    if (free := shutil.disk_usage(folder.parent).free) < RESERVE:
        raise StepFailed(
            f"the disk is full: {_size(free)} is free in {folder.parent}, and builds leave {_size(RESERVE)} free"
        )


def disk_usage(tree: Path) -> int:
    """Return the disk space of a tree that may be changing. Holes take none, and hard links count once."""
    taken: dict[int, int] = {}
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            with suppress(OSError):  # gone, or of a subordinate id
                found = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - Path is slow for ten thousand files
                taken[found.st_ino] = found.st_blocks * BLOCK
    return sum(taken.values())


def _size(count: int) -> str:
    return f"{count / 1024**3:.1f} GB" if count >= 1024**3 else f"{count / 1024**2:.0f} MB"
