"""What a gVisor machine takes of the host's memory: measured, and limited on hosts without cgroups."""

import asyncio
import logging
import math
import os
import re
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import anyio

from vmm.process_table import with_descendants

MEMORY_FILE = "/memfd:runsc-memory (deleted)"
BLOCK_BYTES = 512  # what st_blocks counts in
LOOK_S = 0.1  # between two looks; the agent in the machine looks more often, and ends code instead of the machine
LATE_S = 30.0  # for a sentry to appear; after that something is wrong
ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)

logger = logging.getLogger(__name__)


class Sentry(NamedTuple):
    """The process that is a machine's kernel, and the file in which it keeps all memory of the machine."""

    pid: int
    memory_file: Path

    def used_bytes(self) -> int:
        """Return what both take from the host. Raises OSError if the process has ended."""
        own = ANONYMOUS.search(Path(f"/proc/{self.pid}/status").read_text())
        return file_bytes(self.memory_file) + (int(own[1]) * 1024 if own else 0)


def find_sentry(pids: Iterable[int]) -> Sentry | None:
    """Return the sentry, if it is one of these processes."""
    for pid in pids:
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # it has just been closed
                    if str(link.readlink()) == MEMORY_FILE:
                        return Sentry(pid, link)
    return None


def file_bytes(path: Path) -> int:
    """Return how much of a file there is; most of the memory file is empty."""
    return path.stat().st_blocks * BLOCK_BYTES


@contextmanager
def limited(first_pid: int, most_bytes: int, exceeded: Callable[[], None]) -> Iterator[None]:
    """Kill the machine below `first_pid` if it takes more, after calling `exceeded`. For hosts without cgroups."""
    # Not a task group: that would wrap the caller's errors.
    watch = asyncio.create_task(_watch(first_pid, most_bytes, exceeded))
    try:
        yield
    finally:
        watch.cancel()


async def _watch(first_pid: int, most_bytes: int, exceeded: Callable[[], None]) -> None:
    """Look until the machine has ended or is killed. If it cannot look, the memory has no bound, and that is logged."""
    try:
        late = anyio.current_time() + LATE_S
        while (sentry := find_sentry(with_descendants(first_pid))) is None:
            if not Path(f"/proc/{first_pid}").exists():
                return
            if anyio.current_time() > late:
                logger.warning("no sentry below process %d: nothing bounds the memory it takes", first_pid)
                late = math.inf
            await anyio.sleep(LOOK_S)
        with suppress(ProcessLookupError), _held(sentry.pid) as process:  # it has ended
            while not _ended(process):
                with suppress(OSError):
                    if sentry.used_bytes() > most_bytes:
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
