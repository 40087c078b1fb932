"""Attempts at what must not be possible, and the means that several attacks need."""

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Callable

# The answers of a kernel, or of a seccomp filter, that refuses a call whatever its arguments are. Any other error
# means that the call was carried out up to a check of its arguments.
REFUSALS = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP})
MOST_SHOWN = 20
KILLED_BY_FILTER = -signal.SIGSYS

libc = ctypes.CDLL(None, use_errno=True)


class Attempts:
    """What was tried, and what of it succeeded although it must not."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.succeeded: list[str] = []

    def note(self, what: str, *, succeeded: bool) -> None:
        """Record one attempt."""
        self.tried.append(what)
        if succeeded:
            self.succeeded.append(what)

    def action(self, what: str, action: Callable[..., object], *arguments: object) -> None:
        """Try something that raises OSError if it is refused."""
        try:
            action(*arguments)
        except OSError:
            self.note(what, succeeded=False)
        else:
            self.note(what, succeeded=True)

    def call(self, name: str, number: int, *arguments: object) -> None:
        """Try a system call, by its number on x86-64, in a process of its own."""
        if platform.machine() != "x86_64":
            raise RuntimeError("the numbers of system calls are those of x86-64")
        answer = in_a_child(lambda: _errno_of(number, arguments))
        refused = answer in REFUSALS or answer == KILLED_BY_FILTER
        reason = "" if refused or not answer else f" ({os.strerror(answer) if answer > 0 else f'signal {-answer}'})"
        self.note(f"{name}{reason}", succeeded=not refused)

    def as_json(self) -> dict[str, object]:
        """Return what the host reads: short enough that no output limit cuts it."""
        return {"tried": len(self.tried), "succeeded": self.succeeded[:MOST_SHOWN]}


def _errno_of(number: int, arguments: tuple[object, ...]) -> int:
    words = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in arguments]
    words += [ctypes.c_ulong(0)] * (6 - len(words))
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *words) == -1 else 0


def in_a_child(function: Callable[[], int]) -> int:
    """Return what `function` returns in a forked process, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        answer = errno.ENOTRECOVERABLE
        try:
            answer = function()  # returns twice if the call clones this process
        finally:
            os._exit(answer)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def open_and_close(path: str, flags: int) -> None:
    """Open a file in some way."""
    os.close(os.open(path, flags))


def read_text(path: str) -> str:
    """Return the start of a file, or nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(65536).decode(errors="replace")
    except OSError:
        return ""


def pids() -> list[int]:
    """Return all visible processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
