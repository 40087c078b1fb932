"""Lists the processes of a machine only after some may have been started, because a list is expensive in gVisor."""

import os
from collections.abc import Callable
from contextlib import suppress

from guest.processes import visible_pids

LOAD = "/proc/loadavg"  # ends with the pid that was assigned last; in gVisor that is always 0
CHILDREN = "/proc/{0}/task/{0}/children"
READ_BYTES = 64 * 1024  # the pids of all processes that a machine can have take less
NO_PID = b"0"
UNLISTED = b"-"


class ProcessList:
    """The visible processes, some of which may have ended.

    On Linux the pid that was assigned last shows whether any was started. In gVisor the children of the agent, which
    adopts orphans, and those of the kernel and of its first child show it, which may be an interpreter; what further
    threads of these start is not among them.
    """

    def __init__(self, kernel: Callable[[], int]) -> None:
        """`kernel` returns the pid of the kernel, or 0."""
        self._kernel = kernel
        # The files stay open, because to open one takes longer than to read it.
        self._load = _open(LOAD)
        self._own_children = _open(CHILDREN.format(os.getpid()))
        self._of_kernel, self._of_interpreter = _Children(), _Children()
        self._counts = self._last_pid() != NO_PID
        self._mark = UNLISTED, b""  # what changes when a process is started, as it was at the last list
        self._pids: set[int] = set()

    def pids(self) -> set[int]:
        """Return them."""
        mark = self._own_mark(), self._mark_of_kernel()
        if mark != self._mark:
            self._pids, self._mark = visible_pids(), mark  # what is started in between changes the next mark
        return self._pids

    @property
    def mark(self) -> bytes:
        """What `may_have_orphans` compares with, as it was when `pids` was called last."""
        return self._mark[0]

    def may_have_orphans(self, since: bytes) -> bool:
        """Return whether a process whose parent has ended may have been started since `mark` was this."""
        return self._own_mark() != since

    def _own_mark(self) -> bytes:
        return self._last_pid() if self._counts else os.pread(self._own_children, READ_BYTES, 0)

    def _last_pid(self) -> bytes:
        return os.pread(self._load, READ_BYTES, 0).split()[-1]

    def _mark_of_kernel(self) -> bytes:
        if self._counts:
            return b""
        children = self._of_kernel.read(self._kernel())
        first = children.split(maxsplit=1)[:1]
        return children + b"/" + self._of_interpreter.read(int(first[0]) if first else 0)


class _Children:
    """The children of a process, which may be another one each time."""

    def __init__(self) -> None:
        self._pid = 0
        self._file = -1

    def read(self, pid: int) -> bytes:
        """Return the children of `pid`, which may be 0, with spaces between them."""
        with suppress(OSError):  # it has just ended
            if pid != self._pid:
                self._watch(pid)
            return os.pread(self._file, READ_BYTES, 0) if pid else b""
        return b""

    def _watch(self, pid: int) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._pid, self._file = 0, -1
        if pid:
            self._file = _open(CHILDREN.format(pid))
        self._pid = pid


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
