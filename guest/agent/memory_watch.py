"""Keeps a machine below its memory limit: it ends the largest job before the host would end the whole machine."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH123

import os
import re
import signal
from collections.abc import Callable
from functools import partial

from guest.agent.children import Children
from guest.agent.loop import Loop
from guest.agent.sweep import broadcast_to, owned_by
from guest.agent.user import User
from guest.processes import Process, end_all, process_count, process_table, tree_of

MIB = 1024 * 1024
GROWTH_MB_S = 2000  # faster than code can fill memory
# Between two looks. The host's limit is higher, but what code takes until the next look must fit in between.
SOONEST_S, LATEST_S = 0.01, 0.25
# What a process costs the host besides its memory in gVisor, whose kernel is part of the machine: 0.4 MB asleep, about
# twice that busy. It counts, so that the most processes there can be do not exceed the host's limit together.
PROCESS_MB = 1
END_S = 1.0  # for the processes of a job to end
FEW = 4  # processes whose shares are added without a look at anything else
ANONYMOUS = re.compile(rb"^AnonPages:\s+(\d+) kB", re.MULTILINE)  # files in memory included, in gVisor
TOTAL = re.compile(rb"^MemTotal:\s+(\d+) kB", re.MULTILINE)
PROPORTIONAL = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


class MemoryWatch:
    """Measures the machine from its first run on, more often the less memory is left.

    A job is a process that `roots` returns, with its descendants; everything else of the user's is one more job.
    `spare` returns processes that are part of no job. `ended(root)` is called when a job was ended; root 0 is the rest.
    """

    def __init__(
        self,
        loop: Loop,
        user: User,
        children: Children,
        roots: Callable[[], set[int]],
        spare: Callable[[], set[int]],
        ended: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._user = user
        self._children = children
        self._roots, self._spare, self._ended = roots, spare, ended
        self._places: list[str] = []
        self._started = False

    def start(self) -> None:
        """Begin to watch, if the machine has a limit and nothing else watches it."""
        if self._user.memory_mb and not self._started:
            self._started = True
            self._places = [] if self._user.own_kernel else writable_places()
            self._look()

    @property
    def _limit(self) -> int:
        return self._user.memory_mb * MIB

    def _look(self) -> None:
        if self._user.own_kernel:
            self._decide(_kilobytes(ANONYMOUS, "/proc/meminfo") * 1024 + process_count() * PROCESS_MB * MIB)
            return
        files, table = self._files(), process_table()
        resident = files + _resident(table)
        if resident <= self._limit:  # it counts shared pages several times, so the truth is less
            self._decide(resident)
        else:
            self._add_shares(files, sorted(table, key=lambda pid: -table[pid].resident_bytes))

    def _files(self) -> int:
        return sum((space.f_blocks - space.f_bfree) * space.f_frsize for space in map(os.statvfs, self._places))

    def _add_shares(self, used: int, pids: list[int]) -> None:
        """Add the shares that processes have in the memory, a few at a time.

        Beside a fork bomb all of them take the agent seconds, and its stop has to get through.
        """
        used += sum(_kilobytes(PROPORTIONAL, f"/proc/{pid}/smaps_rollup") * 1024 for pid in pids[:FEW])
        if len(pids) > FEW and used <= self._limit:
            self._loop.soon(partial(self._add_shares, used, pids[FEW:]))
        else:
            self._decide(used)

    def _decide(self, used: int) -> None:
        left = self._limit - used
        if left < 0:
            self._end_largest()
        self._loop.later(min(max(left / MIB / GROWTH_MB_S, SOONEST_S), LATEST_S), self._look)

    def _end_largest(self) -> None:
        broadcast = broadcast_to(self._user) or (lambda number: None)
        broadcast(signal.SIGSTOP)  # before anything else: code that fills memory leaves no time to look at it
        table = process_table()
        if not self._user.own_kernel and self._files() + _resident(table) <= self._limit:
            broadcast(signal.SIGCONT)  # a run was stopped while the shares of its processes were added
            return
        jobs = self._jobs(table)
        sizes = {root: sum(table[pid].resident_bytes for pid in pids) for root, pids in jobs.items()}
        root = max(sizes, key=lambda root: sizes[root], default=None)
        if root is None:
            broadcast(signal.SIGCONT)
            return
        end_all(lambda: self._jobs(process_table()).get(root, set()), self._children.reap, END_S, broadcast)
        self._ended(root)

    def _jobs(self, table: dict[int, Process]) -> dict[int, set[int]]:
        jobs = {root: tree_of({root}, table) & table.keys() for root in self._roots() if root in table}
        others = owned_by(self._user) & (table.keys() - {1, os.getpid()} - tree_of(self._spare(), table))
        rest = others.difference(*jobs.values())
        return {**jobs, 0: rest} if rest else jobs


def _resident(table: dict[int, Process]) -> int:
    return sum(process.resident_bytes for process in table.values())


def writable_places() -> list[str]:
    """Return where files in memory are mounted."""
    with open("/proc/mounts") as file:
        mounts = [line.split() for line in file]
    return [place for _, place, kind, options, *_ in mounts if kind == "tmpfs" and "rw" in options.split(",")]


def total_mb() -> int:
    """Return how much memory the machine's kernel has."""
    return _kilobytes(TOTAL, "/proc/meminfo") // 1024


def _kilobytes(what: re.Pattern[bytes], path: str) -> int:
    try:
        with open(path, "rb") as file:
            found = what.search(file.read())
    except OSError:  # the process has ended
        return 0
    return int(found[1]) if found else 0
