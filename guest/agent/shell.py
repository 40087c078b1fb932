"""Runs shell commands, one at a time, each in a new shell beside the kernel."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from guest.agent.children import Children
from guest.agent.execution import Execution
from guest.agent.loop import Link, Loop
from guest.agent.process_list import ProcessList
from guest.agent.shell_session import MAX_RECORD, RECORD_FD, Call, Session, parse_call
from guest.agent.streams import Streams
from guest.agent.sweep import RunProcesses, make_room
from guest.agent.user import User
from guest.environment import Changes
from guest.errors import ProtocolError, RequestRefused
from guest.places import WORKSPACE
from guest.prctl import become_subreaper
from guest.processes import input_file, reset_signals

SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")  # the first that exists is used
LAST_S = 0.2  # for processes that no shell waits for to finish, such as tee in `command > >(tee log)`
NOT_RUN = 126  # the exit code of shells for what could not be started
WARM_UP = {"id": 0, "grace_ms": 1000, "head_bytes": 8000, "tail_bytes": 0, "max_display_bytes": 0}
MADE_ROOM = (
    b"mcp-sandbox: the sandbox was full of processes that earlier runs had left running, so nothing could start. "
    b"They were ended.\n"
)

Ended = Callable[[Execution, dict[str, Any]], None]


def find_shell() -> str | None:
    """Return the shell of the template."""
    return next((path for path in SHELLS if os.access(path, os.X_OK)), None)


class Started(NamedTuple):
    """A command that is running."""

    run: Execution
    call: Call
    pid: int
    record: int  # the file in which its shell leaves its session
    processes: RunProcesses
    ended: Ended


class Shell:
    """Runs at most one command. What the processes that a command keeps write is output of the next command.

    `keep` returns the processes that are never ended for a command: kernel, zygote, service.
    """

    def __init__(
        self,
        loop: Loop,
        channel: Link,
        user: User,
        children: Children,
        keep: Callable[[], set[int]],
        listed: ProcessList,
    ) -> None:
        self._loop = loop
        self._user = user
        self._children = children
        self._keep = keep
        self._listed = listed
        self._session = Session()
        self._current: Started | None = None
        self.streams = Streams(loop, channel, user)
        self.memory_watched = False  # see `User.drop_privileges`

    @property
    def run(self) -> Execution | None:
        """The command that is running."""
        return self._current and self._current.run

    @property
    def pid(self) -> int:
        """The shell of the command that is running, or 0."""
        return self._current.pid if self._current else 0

    def start(self, run: Execution, ended: Ended) -> None:
        """Run a command; `ended` gets its result. Raises RequestRefused."""
        if run.kind not in ("code", "command"):
            raise RequestRefused("bad_request", "this sandbox runs shell commands only")
        try:
            command, options = run.split()
        except ProtocolError as error:
            raise RequestRefused("bad_request", f"invalid command: {error}") from error
        call = parse_call(options)
        shell = find_shell()
        if shell is None:
            raise RequestRefused("bad_request", "there is no shell in this sandbox's template, so no command can run")
        folder, directory = self._enter(call, run)
        try:
            arguments = self._session.arguments(command, call, folder)
            if make_room(self._user, self._children, self._keep()):
                run.feed("stderr", MADE_ROOM)
            processes = RunProcesses(self._user, self._children, self._keep, self._listed)
            pid, record = self._fork(shell, arguments, directory, call.stdin)
        except OSError as error:
            raise RequestRefused("no_kernel", f"no process can be started: {error.strerror}") from error
        finally:
            os.close(directory)
        self._current = Started(run, call, pid, record, processes, ended)
        self._children.watch(pid, self._end)
        self.streams.begin(run)

    def stop(self) -> None:
        """Interrupt the running command, and kill it when its grace period is over.

        When it has ended, so have all processes that it started, in whatever session.
        """
        current = self._current
        assert current is not None

        def kill() -> None:
            if self._current is current:
                current.processes.end()

        with suppress(ProcessLookupError):
            os.killpg(current.pid, signal.SIGINT)
        self._loop.later(current.run.grace_s, kill)

    def change_environment(self, changes: Changes) -> None:
        """Change the environment of the next commands. The first one inherits the agent's."""
        self._session.change(changes)

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run a template's warm-up script; `done` gets its output if it fails, or None. Its session is discarded."""
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

        self.start(Execution({**WARM_UP, "keep_processes": True}, code.encode(), 0, self._user, send), ended)

    # ------------------------------------------------------------ one command

    def _enter(self, call: Call, run: Execution) -> tuple[str, int]:
        """Return the directory a command starts in, and a descriptor of it."""
        folder = self._session.resolve(call.cwd)
        try:
            return folder, self._open(folder)
        except OSError as error:
            if call.cwd is not None:
                raise RequestRefused("bad_request", f"cwd: {folder}: {error.strerror}") from error
            note = f"mcp-sandbox: {folder}: {error.strerror}; back in {WORKSPACE}\n"
            run.feed("stderr", note.encode("utf-8", "surrogateescape"))  # a directory's name can be any bytes
            return WORKSPACE, self._open(WORKSPACE)

    def _open(self, folder: str) -> int:
        with self._user.acting():
            return os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _fork(self, shell: str, arguments: list[str], directory: int, stdin: bytes) -> tuple[int, int]:
        """Fork a process that execs the shell; returns its pid and the file in which it leaves its session."""
        record = os.memfd_create("session")
        try:
            pid = os.fork()
        except OSError:
            os.close(record)
            raise
        if pid == 0:
            try:
                self._place_descriptors(record, stdin)
                self._user.drop_privileges(memory_watched=self.memory_watched)
                become_subreaper()  # so that all of the command's processes are one job, see `MemoryWatch`
                os.fchdir(directory)
                self._exec(shell, arguments)
            except OSError as error:
                os.write(2, f"mcp-sandbox: the command could not be started: {error}\n".encode())
            finally:
                os._exit(NOT_RUN)
        return pid, record

    def _place_descriptors(self, record: int, stdin: bytes) -> None:
        """Move descriptors to where a shell expects them; the exec closes all others."""
        stdout, stderr = self.streams.writers
        os.dup2(input_file(stdin), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.dup2(record, RECORD_FD)
        os.set_inheritable(RECORD_FD, True)  # dup2 does not do so if the descriptor was there already

    def _exec(self, shell: str, arguments: list[str]) -> NoReturn:
        reset_signals()
        # The session's exports are the whole environment, so that a variable that a command has unset stays unset.
        environment = {} if self._session.exports else os.environ
        os.execve(shell, [shell, "-c", *arguments], environment)  # noqa: S606

    def _end(self, status: int) -> None:
        """Finish the command whose shell has exited, as soon as nothing else of it runs, or a little later."""
        current = self._current
        assert current is not None
        if current.run.stopped or current.run.keep_processes or not current.processes.any_left:
            self._finish(current, status)
        else:
            self._loop.later(LAST_S, lambda: self._finish(current, status))

    def _finish(self, current: Started, status: int) -> None:
        run = current.run
        run.end_processes(current.processes)
        self.streams.drain()
        if os.WIFEXITED(status) and not run.stopped:
            record = os.pread(current.record, MAX_RECORD + 1, 0)
            if note := self._session.take(record, current.call):
                run.feed("stderr", note.encode())
        os.close(current.record)
        self.streams.end()
        self._current = None
        current.ended(run, run.command_ended(status))
