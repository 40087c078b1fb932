"""What a gVisor machine takes of the host's memory: measured, and limited on hosts without cgroups."""

import asyncio
import os
import re
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
ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


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
    sentry: Sentry | None = None
    while True:
        await anyio.sleep(LOOK_S)
        sentry = sentry or find_sentry(with_descendants(first_pid))
        with suppress(OSError):  # it has ended
            if sentry and sentry.used_bytes() > most_bytes:
                exceeded()
                os.kill(sentry.pid, signal.SIGKILL)
                return
