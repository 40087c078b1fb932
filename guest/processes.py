"""Processes in a machine, for the agent and the kernels: how to start, find and end them."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH123, PTH208

import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

# Python ignores the first two, and a shell that starts the agent in the background makes it ignore the others.
# Programs expect the defaults.
DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT)
FEW = 20  # processes that can be looked at one by one while they run
FEW_S = 0.2  # for as many to end
BURST = 50  # signals in a row: in gVisor, one does not reach processes that are just being forked
END_PAUSE_S = 0.001  # between two rounds of killing
PAGE = resource.getpagesize()


class Process(NamedTuple):
    """The parent, process group, memory and session of a process."""

    parent: int
    group: int
    resident_bytes: int
    zombie: bool = False
    session: int = 0


def set_soft_limits(limits: dict[int, int], pid: int = 0) -> None:
    """Set the limits of a process, by their kinds, as far as its hard limits allow it. They can be changed again.

    Without a `pid`, it is this process. Raises OSError.
    """
    for kind, value in limits.items():
        hard = resource.prlimit(pid, kind)[1]
        resource.prlimit(pid, kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def reset_signals() -> None:
    """Restore the default signal handlers in a process that is about to exec a program."""
    for number in DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"SIG{number}"


def input_file(data: bytes) -> int:
    """Return a descriptor to read `data` from, so that no process has to write it into a pipe."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def open_input(path: str) -> int:
    """Open the FIFO of a run to read from it, in a kernel, whether or not its writer is still there. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


def process_table() -> dict[int, Process]:
    """Return all visible processes by pid. Zombies are among them."""
    table: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError):  # it may end meanwhile
                fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()  # the name can have any character
                resident = int(fields[21]) * PAGE
                zombie = fields[0] in (b"Z", b"X")
                table[int(name)] = Process(int(fields[1]), int(fields[2]), resident, zombie, int(fields[3]))
    return table


def _read(path: str) -> bytes:
    """Read a small file with three system calls; a file object needs nine. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, PAGE)
    finally:
        os.close(fd)


def tree_of(roots: Iterable[int], table: dict[int, Process]) -> set[int]:
    """Return these processes and all their descendants."""
    tree = set(roots)
    while more := {pid for pid, process in table.items() if process.parent in tree} - tree:
        tree |= more
    return tree


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def end_all(
    find: Callable[[], set[int]],
    reap: Callable[[], None],
    limit_s: float,
    broadcast: Callable[[int], None] | None,
    *,
    few: bool = False,
) -> bool:
    """Kill the processes that `find` returns until it returns none; False if some are left after `limit_s`.

    `reap` waits for those that are our children. `broadcast` signals all processes of the user at once: they are
    stopped meanwhile, because a fork bomb leaves no time to look at its processes one by one. If there are only a few,
    that is tried first without disturbing the others.
    """
    return (few and _end_all(find, reap, FEW_S, None)) or _end_all(find, reap, limit_s, broadcast)


def _end_all(
    find: Callable[[], set[int]], reap: Callable[[], None], limit_s: float, broadcast: Callable[[int], None] | None
) -> bool:
    deadline = time.monotonic() + limit_s
    while True:
        if broadcast:
            broadcast(signal.SIGSTOP)
        found = find()
        signal_all(found, signal.SIGKILL)
        reap()
        if not found or time.monotonic() > deadline:
            if broadcast:
                broadcast(signal.SIGCONT)
            return not found
        time.sleep(END_PAUSE_S)


def oom_kills() -> int:
    """Return how many processes the kernel has OOM-killed; 0 if it does not say, as in gVisor."""
    with suppress(OSError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0


def signal_everything(number: int) -> None:
    """Signal all processes that this one may signal, except for itself and process 1."""
    with suppress(ProcessLookupError, PermissionError):
        for _ in range(BURST):
            os.kill(-1, number)


def thread_count(pid: int) -> int:
    """Return the number of a process's threads; 0 if there is no such process."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def process_count() -> int:
    """Return the number of visible processes, with one system call."""
    return len(visible_pids())


def visible_pids() -> set[int]:
    """Return all visible processes, with one system call."""
    return set(map(int, filter(str.isdigit, os.listdir("/proc"))))
