"""A shell that is started before the command that it is for: in gVisor that takes most of a short command's time.

It waits for its job and has the privileges of code, so code can end it or tamper with it. If it is gone, the command
starts its own shell. No more than one waits, and none is started beside active commands.
"""

import errno
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from guest.agent.children import Children
from guest.agent.command import Start, start_shell
from guest.agent.shell_session import WAITING
from guest.agent.streams import Streams
from guest.agent.user import User
from guest.places import WORKSPACE


@dataclass(frozen=True, slots=True)
class Started:
    """A shell that waits."""

    pid: int
    environment: Mapping[str, str]
    limits: Mapping[int, int]
    streams: Streams
    record: int  # the file in which it finds its job and leaves its session
    orders: int  # the pipe it waits at
    unread: int  # the end that it reads from, to see whether it has

    def order(self, job: bytes) -> None:
        """Let it begin. The caller closes record and `unread`. Raises OSError: it cannot be told."""
        if os.pwrite(self.record, job, 0) < len(job):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(self.orders, b"\n")
        os.close(self.orders)

    def give_up(self) -> None:
        """End a shell that got no job."""
        self.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close all that it was to get its job with."""
        for fd in (self.record, self.orders, self.unread):
            os.close(fd)


def closing(stack: ExitStack, fd: int) -> int:
    """Return a descriptor that is closed with the stack."""
    stack.callback(os.close, fd)
    return fd


class SpareShell:
    """At most one such shell."""

    def __init__(self, user: User, children: Children) -> None:
        self._user = user
        self._children = children
        self._started: Started | None = None

    @property
    def pid(self) -> int:
        """Its process; 0 if there is none."""
        return self._started.pid if self._started else 0

    @property
    def streams(self) -> Streams | None:
        """Where its output goes."""
        return self._started.streams if self._started else None

    def start(self, shell: str, environment: Mapping[str, str], streams: Streams) -> None:
        """Start a shell. Raises OSError."""
        with ExitStack() as kept, ExitStack() as passed:
            record = closing(kept, os.memfd_create("session"))
            reader, orders = os.pipe2(os.O_CLOEXEC)
            closing(kept, reader)
            closing(kept, orders)
            os.set_blocking(orders, False)  # code of the same user could have filled it
            directory = closing(passed, os.open(WORKSPACE, os.O_PATH | os.O_CLOEXEC))
            null = closing(passed, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            start = Start((shell, *WAITING), environment, directory, null, streams.writers, record, reader)
            pid = start_shell(start, self._user)
            kept.pop_all()
        limits = self._user.soft_limits()
        self._started = Started(pid, dict(environment), limits, streams, record, orders, reader)
        self._children.watch(pid, partial(self._ended, self._started))

    def take(self) -> Started | None:
        """Return the shell for a command, if it waits and has the limits that code has now."""
        started = self._started
        if started is None:
            return None
        self._children.reap()  # its end may not have been noticed yet
        try:
            os.kill(started.pid, signal.SIGCONT)  # code may have stopped it
        except ProcessLookupError:
            return None
        if started.limits != self._user.soft_limits():
            os.kill(started.pid, signal.SIGKILL)
            return None
        self._started = None
        return started

    def _ended(self, started: Started, _status: int) -> None:
        if self._started is started:
            self._started = None
            started.close()
