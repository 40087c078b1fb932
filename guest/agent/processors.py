"""Shows code only the CPUs that its machine may use, where the machine's kernel would show all of the host's (gVisor).

The host's cgroup limits how much CPU time a machine gets. What code sees decides how many threads and processes
libraries start, so it must be the same number.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103, PTH123, PTH208

import ctypes
import os
from contextlib import suppress

SYSTEM = "/sys/devices/system/cpu"
LISTS = ("online", "possible", "present")  # in SYSTEM; the C library counts with the first
INFO = "/proc/cpuinfo"
PLACE = "/run/mcp-sandbox/cpu"  # what covers these files
MS_BIND = 4096


class Processors:
    """The CPUs that code sees. Raises OSError if the machine's kernel does not allow it."""

    def __init__(self, count: int) -> None:
        self._all = sorted(os.sched_getaffinity(0))
        with open(INFO) as file:
            self._info = file.read().split("\n\n")[: len(self._all)]
        os.makedirs(PLACE, exist_ok=True)
        self._write(count)
        for name in LISTS:
            _cover(f"{SYSTEM}/{name}", f"{PLACE}/{name}")
        _cover(INFO, f"{PLACE}/cpuinfo")
        os.sched_setaffinity(0, self._all[:count])  # all other processes descend from this one
        self._count = count

    def show(self, count: int) -> None:
        """Show another number to everything that runs, and to everything started from now on."""
        if count == self._count:
            return
        self._count = count
        self._write(count)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # it has ended
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), self._all[:count])

    def _write(self, count: int) -> None:
        shown = self._all[:count]
        listed = "0\n" if len(shown) == 1 else f"0-{len(shown) - 1}\n"
        for name in LISTS:
            _write(f"{PLACE}/{name}", listed)
        _write(f"{PLACE}/cpuinfo", "\n\n".join((*self._info[: len(shown)], "")))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _cover(path: str, source: str) -> None:
    """Mount a file over another one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), path.encode(), None, ctypes.c_ulong(MS_BIND), None):
        raise OSError(ctypes.get_errno(), f"{path} cannot be covered")
