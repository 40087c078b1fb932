"""A look into the process table: who was started by whom, and who is still there."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vmm.process import children_of as child_pids

PROC = Path("/proc")
# Fields of /proc/<pid>/stat after the name, which is in parentheses and may contain anything.
_STATE, _PARENT, _STARTED = 0, 1, 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process: its number may be given to another one later, its number and start time never."""

    pid: int
    started: int  # clock ticks since the host booted


def of_pid(pid: int) -> ProcessId | None:
    """The process that has this number now, or None."""
    return next((process for process, _ in _running([pid])), None)


def tree_of(pid: int) -> tuple[ProcessId, ...]:
    """A process and all that it has started, parents first; empty if it has ended."""
    tree = [pid]
    for parent in tree:  # grows while it is walked
        tree += child_pids(parent)
    return tuple(process for found in tree if (process := of_pid(found)))


def children_of(parent: ProcessId) -> set[ProcessId]:
    """The processes that `parent` has started and that still run."""
    if not is_alive(parent):
        return set()
    return {process for process, parent_pid in _running() if parent_pid == parent.pid}


def own_child(*arguments: str) -> ProcessId | None:
    """The child of this process whose command line has exactly these arguments after the program, or None."""
    mine = [process for process, parent_pid in _running() if parent_pid == os.getpid()]
    return next((process for process in mine if _arguments(process.pid) == arguments), None)


def is_alive(process: ProcessId) -> bool:
    """Whether it still runs; one that ended and was not reaped yet does not."""
    return any(found == process for found, _ in _running([process.pid]))


def _running(pids: list[int] | None = None) -> Iterator[tuple[ProcessId, int]]:
    """Processes and the numbers of their parents: these ones, or all."""
    for pid in [int(path.name) for path in PROC.glob("[0-9]*")] if pids is None else pids:
        try:
            fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # ended while we looked
            continue
        if fields[_STATE] not in "ZX":
            yield ProcessId(pid, int(fields[_STARTED])), int(fields[_PARENT])


def _arguments(pid: int) -> tuple[str, ...]:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[1:-1]
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return tuple(word.decode(errors="replace") for word in words)
