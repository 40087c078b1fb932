"""What a bubblewrap machine takes of the host's memory."""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vmm.process_table import with_descendants
from vmm.usage import memory_of

PAGE = os.sysconf("SC_PAGESIZE")
FIRST_OF_NAMESPACE = re.compile(r"^NSpid:.*\s1$", re.MULTILINE)


class ProcessTree(NamedTuple):
    """The first process of a machine, with which all others end, and where the machine keeps files in memory."""

    pid: int
    places: tuple[str, ...]

    def used_bytes(self, enough: int) -> int:
        """Return what processes and files take; of more than `enough`, any number above it."""
        files = sum(map(self._held_in, self.places))
        pids = with_descendants(self.pid)
        resident = files + sum(map(_resident, pids))
        if resident <= enough:  # it counts shared pages several times, so the truth is less
            return resident
        return files + memory_of(pids)["Pss"]

    def _held_in(self, place: str) -> int:
        space = os.statvfs(f"/proc/{self.pid}/root{place}")
        return (space.f_blocks - space.f_bfree) * space.f_frsize


def finder(places: Iterable[str]) -> Callable[[Iterable[int]], ProcessTree | None]:
    """Return a function that finds the machine with these places among processes."""

    def find(pids: Iterable[int]) -> ProcessTree | None:
        for pid in pids:
            with suppress(OSError):  # it has ended
                if FIRST_OF_NAMESPACE.search(Path(f"/proc/{pid}/status").read_text()):
                    return ProcessTree(pid, tuple(places))
        return None

    return find


def _resident(pid: int) -> int:
    with suppress(OSError):  # it has ended
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return 0
