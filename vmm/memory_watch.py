"""Limits what a machine takes of the host's memory, on hosts without cgroups: the server looks, and kills it."""

import asyncio
import logging
import math
import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from vmm.errors import MachineLost
from vmm.process_table import with_descendants

LOOK_S = 0.1  # between two looks; the agent in the machine looks more often, and ends code instead of the machine
LATE_S = 30.0  # for a machine to appear; after that something is wrong

logger = logging.getLogger(__name__)


class Measured(Protocol):
    """What takes a machine's memory."""

    @property
    def pid(self) -> int:
        """The process with which the machine ends."""

    def used_bytes(self, enough: int) -> int:
        """Return what it takes; of more than `enough`, any number above it. Raises OSError or MachineLost."""


Find = Callable[[Iterable[int]], Measured | None]  # among these processes


@contextmanager
def limited(first_pid: int, find: Find, most_bytes: int, exceeded: Callable[[], None]) -> Iterator[None]:
    """Kill the machine below `first_pid` if it takes more, after calling `exceeded`."""
    # Not a task group: that would wrap the caller's errors.
    task = asyncio.create_task(watch(first_pid, find, most_bytes, exceeded))
    try:
        yield
    finally:
        task.cancel()


async def watch(first_pid: int, find: Find, most_bytes: int, exceeded: Callable[[], None]) -> None:
    """Look until the machine has ended or is killed. If it cannot look, the memory has no bound, and that is logged."""
    try:
        late = anyio.current_time() + LATE_S
        while (measured := find(with_descendants(first_pid))) is None:
            if not Path(f"/proc/{first_pid}").exists():
                return
            if anyio.current_time() > late:
                logger.warning("no machine below process %d: nothing bounds the memory it takes", first_pid)
                late = math.inf
            await anyio.sleep(LOOK_S)
        with suppress(ProcessLookupError), _held(measured.pid) as process:  # it has ended
            while not _ended(process):
                with suppress(OSError, MachineLost):
                    # In a thread: it reads files of every process, and code decides how many there are.
                    if await anyio.to_thread.run_sync(measured.used_bytes, most_bytes) > most_bytes:
                        exceeded()
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                        return
                await anyio.sleep(LOOK_S)
    except Exception:
        logger.exception("the memory of process %d is not watched any more", first_pid)


@contextmanager
def _held(pid: int) -> Iterator[int]:
    """Yield a descriptor that means this process for ever. Raises ProcessLookupError if it has ended."""
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


def _ended(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0])
