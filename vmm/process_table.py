"""The host's process table: which processes run, and which processes they have started.

psutil knows both, but scans all processes of the host to find the children of one, and its start times follow the
system clock. Here a look costs a few files, and a start time never changes.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ENDED = "ZX"  # states of a process that was not reaped yet
STATE, STARTED = 0, 19  # fields of a `stat` file after the name, which is in parentheses and may contain anything


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process. Its pid may be used again; pid and start time together never are."""

    pid: int
    started: int  # clock ticks since the host booted


def of_pid(pid: int) -> ProcessId | None:
    """Return the process that has this pid now, or None."""
    fields = _stat(Path(f"/proc/{pid}"))
    return ProcessId(pid, int(fields[STARTED])) if fields and fields[STATE] not in ENDED else None


def is_alive(process: ProcessId) -> bool:
    """Return whether a process runs; one that ended and was not reaped yet does not."""
    return of_pid(process.pid) == process


def children_of(pid: int) -> list[int]:
    """Return the pids of the children of a process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        threads = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return []


def with_descendants(pid: int) -> list[int]:
    """Return the pids of a process and all below it, parents first."""
    found, new = [pid], children_of(pid)
    while new:
        found += new
        new = [grandchild for child in new for grandchild in children_of(child)]
    return found


def tree_of(pid: int) -> tuple[ProcessId, ...]:
    """Return a process and all below it, parents first; nothing if it has ended."""
    return tuple(process for found in with_descendants(pid) if (process := of_pid(found)))


def thread_states(pid: int) -> set[str]:
    """Return the states of a process's threads, as letters; nothing if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return {fields[STATE] for thread in Path(f"/proc/{pid}/task").iterdir() if (fields := _stat(thread))}
    return set()


def own_child(*arguments: str) -> ProcessId | None:
    """Return the child of this process that was started with exactly these arguments, or None."""
    for pid in children_of(os.getpid()):
        with suppress(psutil.Error):
            if psutil.Process(pid).cmdline()[1:] == list(arguments):
                return of_pid(pid)
    return None


def _stat(directory: Path) -> list[str]:
    """Return the fields of a `stat` file after the name; nothing if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
