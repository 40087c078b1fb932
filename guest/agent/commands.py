"""Runs shell commands, one at a time, each in a shell of its own beside the kernel."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from guest.agent.children import Children
from guest.agent.execution import Execution
from guest.agent.loop import Link, Loop
from guest.agent.session import MAX_RECORD, RECORD_FD, Call, Session, parse_call
from guest.agent.streams import Streams
from guest.agent.user import User
from guest.errors import ProtocolError, RequestRefused
from guest.places import WORKSPACE
from guest.programs import as_file, reset_signals

SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")  # the first that is there
NOT_RUN = 126  # the exit code of what could not be started, as shells have it
WARM_UP = {"id": 0, "grace_ms": 1000, "head_bytes": 8000, "tail_bytes": 0, "max_display_bytes": 0}

Ended = Callable[[Execution, dict[str, Any]], None]


class Started(NamedTuple):
    """A command that is on."""

    run: Execution
    call: Call
    pid: int
    record: int  # the file in which its shell leaves its session
    ended: Ended


class Commands:
    """At most one command. What it leaves running goes on, and what that writes is the next command's output."""

    def __init__(self, loop: Loop, channel: Link, user: User, children: Children) -> None:
        self._loop = loop
        self._user = user
        self._children = children
        self._session = Session()
        self._current: Started | None = None
        self.streams = Streams(loop, channel, user)
        self.reserving = False  # what runs here has more memory in sight than there is, see `User.become`

    @property
    def run(self) -> Execution | None:
        """The run that is on."""
        return self._current and self._current.run

    def start(self, run: Execution, ended: Ended) -> None:
        """Run a command; `ended` gets its result. Raises RequestRefused."""
        if run.kind not in ("code", "command"):
            raise RequestRefused("bad_request", "this sandbox runs shell commands only")
        try:
            command, options = run.order_for_shell()
        except (ValueError, ProtocolError) as error:
            raise RequestRefused("bad_request", f"this is no command: {error}") from error
        call = parse_call(options)
        shell = next((path for path in SHELLS if os.access(path, os.X_OK)), None)
        if shell is None:
            raise RequestRefused("bad_request", "there is no shell in this sandbox's template, so no command can run")
        folder, directory = self._enter(call, run)
        try:
            pid, record = self._fork(shell, self._session.arguments(command, call, folder), directory, call.stdin)
        except OSError as error:
            raise RequestRefused("no_kernel", f"no process can be started: {error.strerror}") from error
        finally:
            os.close(directory)
        self._current = Started(run, call, pid, record, ended)
        self._children.watch(pid, self._end)
        self.streams.begin(run)

    def stop(self) -> None:
        """Interrupt the command that is on, then kill it when its grace is over."""
        current = self._current
        assert current is not None

        def kill() -> None:
            if self._current is current:
                _signal(current, signal.SIGKILL)

        _signal(current, signal.SIGINT)
        self._loop.later(current.run.grace_s, kill)

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run a template's warm-up script; `done` gets what it wrote if it fails, or None. Its session is forgotten."""
        if not code.strip():
            done(None)
            return
        written = bytearray()

        def send(_header: dict[str, Any], data: bytes) -> None:
            written.extend(data)

        def ended(run: Execution, result: dict[str, Any]) -> None:
            self._session = Session()
            run.finish(result, b"", [])
            failed = f"{written.decode('utf-8', 'replace')}\n{result}" if result["status"] != "ok" else None
            done(failed)

        self.start(Execution(WARM_UP, code.encode(), 0, self._user, send), ended)

    # ------------------------------------------------------------ one command

    def _enter(self, call: Call, run: Execution) -> tuple[str, int]:
        """The directory a command starts in, and a descriptor of it."""
        folder = self._session.resolve(call.cwd)
        try:
            return folder, self._open(folder)
        except OSError as error:
            if call.cwd is not None:
                raise RequestRefused("bad_request", f"cwd: {folder}: {error.strerror}") from error
            run.feed("stderr", f"mcp-sandbox: {folder}: {error.strerror}; back in {WORKSPACE}\n".encode())
            return WORKSPACE, self._open(WORKSPACE)

    def _open(self, folder: str) -> int:
        with self._user.acting():
            return os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _fork(self, shell: str, arguments: list[str], directory: int, stdin: bytes) -> tuple[int, int]:
        """A process that becomes the shell, and the file in which that leaves its session."""
        record = os.memfd_create("session")
        try:
            pid = os.fork()
        except OSError:
            os.close(record)
            raise
        if pid == 0:
            try:
                self._take_places(record, stdin)
                self._user.let_loose(watched=self.reserving)
                os.fchdir(directory)
                self._become(shell, arguments)
            except OSError as error:
                os.write(2, f"mcp-sandbox: the command could not be started: {error}\n".encode())
            finally:
                os._exit(NOT_RUN)
        return pid, record

    def _take_places(self, record: int, stdin: bytes) -> None:
        """Put descriptors where a shell expects them; all others end with the exec."""
        stdout, stderr = self.streams.writers
        os.dup2(as_file(stdin), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.dup2(record, RECORD_FD)
        os.set_inheritable(RECORD_FD, True)  # if it was there already, nothing was done to it

    def _become(self, shell: str, arguments: list[str]) -> NoReturn:
        reset_signals()
        # A session's exports are all there is: what a command has unset stays unset.
        environment = {} if self._session.exports else os.environ
        os.execve(shell, [shell, "-c", *arguments], environment)  # noqa: S606

    def _end(self, status: int) -> None:
        """The shell has exited. What it left running is not waited for."""
        current = self._current
        assert current is not None
        run = current.run
        self.streams.drain()
        if os.WIFEXITED(status) and not run.stopped:
            record = os.pread(current.record, MAX_RECORD + 1, 0)
            if note := self._session.take(record, current.call):
                run.feed("stderr", note.encode())
        os.close(current.record)
        self.streams.end()
        self._current = None
        current.ended(run, run.command_ended(status))


def _signal(current: Started, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(current.pid, number)
