"""One shell command that is running: its process, its output, and what it leaves behind."""

import fcntl
import os
import signal
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from guest.agent.execution import Execution
from guest.agent.loop import Loop
from guest.agent.run_processes import RunProcesses
from guest.agent.shell_session import MAX_RECORD, ORDER_FD, RECORD_FD, Call
from guest.agent.streams import Streams
from guest.agent.user import User
from guest.prctl import become_subreaper
from guest.processes import input_file, reset_signals

LAST_S = 0.2  # for processes that no shell waits for to finish, such as tee in `command > >(tee log)`
NOT_RUN = 126  # the exit code of shells for what could not be started


class Start(NamedTuple):
    """How a shell is started: its descriptors are copied to their places."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    directory: int
    stdin: int
    outputs: list[int]  # for stdout and stderr
    record: int  # the file in which it leaves its session
    order: int | None = None  # where it waits for its job


def start_shell(start: Start, user: User) -> int:
    """Start a shell with the privileges of code; returns its pid. Raises OSError.

    This is the only place where a command's process is started.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        for number, fd in enumerate((start.stdin, *start.outputs)):
            os.dup2(fd, number)
        user.drop_privileges()
        become_subreaper()  # so that all of the command's processes are one job, see `MemoryWatch`
        os.fchdir(start.directory)
        kept = {RECORD_FD: start.record} | ({} if start.order is None else {ORDER_FD: start.order})
        # Away from these numbers first: any descriptor may have one of them, also the directory, which was used.
        copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, RECORD_FD + 1) for number, fd in kept.items()}
        for number, fd in copies.items():
            os.dup2(fd, number)
        reset_signals()
        os.execve(start.arguments[0], list(start.arguments), start.environment)  # noqa: S606 - it is the shell
    except OSError as error:
        if start.order is None:  # nobody has given a command to one that is started ahead
            os.write(2, f"mcp-sandbox: the command could not be started: {error}\n".encode())
    finally:
        os._exit(NOT_RUN)


def stdin_of(run: Execution, call: Call) -> int:
    """Return a descriptor of what a command reads, which the caller closes."""
    return input_file(call.stdin) if run.stdin is None else os.dup(run.stdin.reader)


class Command:
    """A command from the start of its shell until nothing of it runs. `ended` gets the status of its shell."""

    def __init__(
        self,
        run: Execution,
        call: Call,
        streams: Streams,
        processes: RunProcesses,
        record: int,
        number: int,
        *,
        job_bytes: int = 0,
        unread: int | None = None,
    ) -> None:
        self.run = run
        self.call = call
        self.streams = streams
        self.number = number  # counts the commands of the machine
        self.over = False
        self._processes = processes
        self._record = record
        self._job_bytes = job_bytes  # in front of the record
        self._unread = unread  # the pipe on which its shell is told to begin, if it was started ahead

    @property
    def pid(self) -> int:
        """Its shell."""
        return self._processes.root

    @property
    def never_began(self) -> bool:
        """Whether its shell has ended before it took the job: code can end a shell that waits."""
        return self._unread is not None and any(fcntl.ioctl(self._unread, termios.FIONREAD, bytes(4)))

    def stop(self, loop: Loop) -> None:
        """Interrupt it, and kill it when its grace period is over.

        When it has ended, so have all processes that it started, in whatever session.
        """

        def kill() -> None:
            if not self.over:
                self._processes.end()

        self._processes.doom()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)
        loop.later(self.run.grace_s, kill)

    def shell_ended(self, loop: Loop, finish: Callable[[], None]) -> None:
        """Call `finish` as soon as nothing else of it runs, or a little later."""
        self._processes.orphans = True
        if self.run.stopped or self.run.keep_processes or not self._processes.any_left:
            finish()
        else:
            loop.later(LAST_S, finish)

    def end(self) -> bytes:
        """End what is left of it and read the rest of its output; returns what its shell has left of its session."""
        self.over = True
        self.run.end_processes(self._processes)
        self.streams.drain()
        self.streams.end()
        record = os.pread(self._record, MAX_RECORD + 1, self._job_bytes)
        self._close()
        return record

    def discard(self) -> None:
        """Forget it, if it never began."""
        self.over = True
        self._processes.release()
        self.streams.end()
        self._close()

    def _close(self) -> None:
        os.close(self._record)
        if self._unread is not None:
            os.close(self._unread)
