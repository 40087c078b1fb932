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
    adopts orphans, and those of the kernel show it; what further threads of the kernel start is not among these.
    """

    def __init__(self, kernel: Callable[[], int]) -> None:
        """`kernel` returns the pid of the kernel, or 0."""
        self._kernel = kernel
        self._watched = 0  # the kernel whose children are read
        # The files stay open, because to open one takes longer than to read it.
        self._load = _open(LOAD)
        self._own_children = _open(CHILDREN.format(os.getpid()))
        self._its_children = -1
        self._counts = self._last_pid() != NO_PID
        self._mark = UNLISTED, b""  # what changes when a process is started, as it was at the last list
        self._pids: set[int] = set()

    def pids(self) -> set[int]:
        """Return them."""
        mark = self._own_mark(), self._mark_of_kernel()
        if mark != self._mark:
            self._pids, self._mark = visible_pids(), mark  # what is started in between changes the next mark
        return self._pids

    def may_have_orphans(self) -> bool:
        """Return whether a process whose parent has ended may have been started since `pids` was called."""
        return self._own_mark() != self._mark[0]

    def _own_mark(self) -> bytes:
        return self._last_pid() if self._counts else os.pread(self._own_children, READ_BYTES, 0)

    def _last_pid(self) -> bytes:
        return os.pread(self._load, READ_BYTES, 0).split()[-1]

    def _mark_of_kernel(self) -> bytes:
        if self._counts:
            return b""
        with suppress(OSError):  # it has just ended
            if (kernel := self._kernel()) != self._watched:
                self._watch(kernel)
            return os.pread(self._its_children, READ_BYTES, 0) if kernel else b""
        return b""

    def _watch(self, kernel: int) -> None:
        if self._its_children >= 0:
            os.close(self._its_children)
            self._watched, self._its_children = 0, -1
        if kernel:
            self._its_children = _open(CHILDREN.format(kernel))
        self._watched = kernel


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
