"""Runs shell commands beside the kernel and beside each other, each in a new shell."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from guest.agent.children import Children
from guest.agent.command import Command, Start, start_shell, stdin_of
from guest.agent.execution import Execution
from guest.agent.loop import Link, Loop
from guest.agent.run_processes import Ledger
from guest.agent.shell_session import Call, Job, Session, parse_call
from guest.agent.single_program import is_single_program
from guest.agent.spare_shell import SpareShell
from guest.agent.streams import Streams
from guest.agent.sweep import make_room
from guest.agent.user import User
from guest.environment import Changes, difference
from guest.errors import ProtocolError, RequestRefused
from guest.places import WORKSPACE
from guest.processes import FEW, process_count
from guest.protocol import MAX_COMMANDS

SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")  # the first that exists is used
SPARE_PAUSE_S = 0.005  # so that the result of a command is sent before the next shell is started
WARM_UP = {"id": 0, "grace_ms": 1000, "head_bytes": 8000, "tail_bytes": 0, "max_display_bytes": 0}
MADE_ROOM = (
    b"mcp-sandbox: the sandbox was full of processes that earlier runs had left running, so nothing could start. "
    b"They were ended.\n"
)

Ended = Callable[[Execution, dict[str, Any]], None]


def find_shell() -> str | None:
    """Return the shell of the template."""
    return next((path for path in SHELLS if os.access(path, os.X_OK)), None)


class Shell:
    """Starts commands. What the processes that a command keeps write is output of a later command.

    Each command begins with the session as it is then, and passes on its own when it ends, unless another command has
    been started meanwhile: so the last one that was started decides.
    """

    def __init__(self, loop: Loop, channel: Link, user: User, children: Children, ledger: Ledger) -> None:
        self._loop = loop
        self._channel = channel
        self._user = user
        self._children = children
        self._ledger = ledger
        self._session = Session()
        self._count = 0  # commands started so far
        self._streams = [Streams(loop, channel, user)]  # of active commands, and those that later ones use
        self.spare = SpareShell(user, children)
        self.commands: list[Command] = []  # active ones, oldest first

    @property
    def pids(self) -> set[int]:
        """The shells of active commands."""
        return {command.pid for command in self.commands}

    def find(self, pid: int) -> Execution | None:
        """Return the run whose shell this is."""
        return next((command.run for command in self.commands if command.pid == pid), None)

    def start(self, run: Execution, ended: Ended) -> None:
        """Run a command; `ended` gets its result. Raises RequestRefused."""
        if run.kind not in ("code", "command"):
            raise RequestRefused("bad_request", "this sandbox runs shell commands only")
        if len(self.commands) >= MAX_COMMANDS:
            raise RequestRefused("busy", f"{MAX_COMMANDS} commands are active in this sandbox already")
        try:
            line, options = run.split()
        except ProtocolError as error:
            raise RequestRefused("bad_request", f"invalid command: {error}") from error
        call = parse_call(options)
        shell = find_shell()
        if shell is None:
            raise RequestRefused("bad_request", "there is no shell in this sandbox's template, so no command can run")
        folder, directory = self._enter(call, run)
        try:
            job = self._session.job(self._without_fork(line, call), call, folder)
            if make_room(self._user, self._children, self._ledger.keep() - {self.spare.pid} | self.pids):
                run.feed("stderr", MADE_ROOM)
            command = self._hand_over(run, call, job, folder) or self._start(
                run, call, [shell, *job.arguments], directory
            )
        except OSError as error:
            raise RequestRefused("no_kernel", f"no process can be started: {error.strerror}") from error
        finally:
            os.close(directory)
        self.commands.append(command)
        self._children.watch(command.pid, partial(self._shell_ended, command, ended))
        command.streams.begin(run)

    def stop(self, run: Execution) -> bool:
        """Stop the command of a run; False if it has none."""
        command = next((command for command in self.commands if command.run is run), None)
        if command is None:
            return False
        command.stop(self._loop)
        return True

    def resume(self) -> None:
        """Read output on: the host takes it again."""
        for streams in self._streams:
            streams.resume()

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

    def _without_fork(self, line: str, call: Call) -> str:
        """Return a line that makes the shell become its program, if it has only one."""
        if "PATH" in call.env or not is_single_program(line, self._session.path):
            return line
        return f"exec {line}"

    def _open(self, folder: str) -> int:
        with self._user.acting():
            return os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _may_enter(self, folder: str) -> bool:
        with self._user.acting():
            return os.access(folder, os.X_OK, effective_ids=True)

    def _hand_over(self, run: Execution, call: Call, job: Job, folder: str) -> Command | None:
        """Give a command to the shell that was started ahead; None if there is none that fits."""
        if call.stdin or run.stdin is not None or self.spare.streams is not self._free_streams():
            return None
        if not self._may_enter(folder):  # a shell of its own says so, and leaves no session behind
            return None
        started = self.spare.take()
        if started is None:
            return None
        written = job.written(difference(started.environment, self._session.environment), folder)
        processes = self._ledger.begin()
        processes.adopt(started.pid)
        try:
            started.order(written)
        except OSError:
            processes.release()
            started.give_up()
            return None
        self._count += 1
        return Command(
            *(run, call, started.streams, processes, started.record, self._count),
            job_bytes=len(written),
            unread=started.unread,
        )

    def _start_ahead(self) -> None:
        """Start the shell of the next command, if that disturbs nothing. The end of each command tries it again."""
        shell = find_shell()
        if self.commands or self.spare.pid or shell is None or not shell.endswith("bash") or process_count() > FEW:
            return
        with suppress(OSError):
            self.spare.start(shell, self._session.environment, self._free_streams())

    def _start(self, run: Execution, call: Call, arguments: list[str], directory: int) -> Command:
        """Start the shell of a command. Raises OSError."""
        streams = self._free_streams()
        record = os.memfd_create("session")
        processes = self._ledger.begin()
        try:
            stdin = stdin_of(run, call)
            try:
                start = Start(arguments, self._session.environment, directory, stdin, streams.writers, record)
                processes.root = start_shell(start, self._user)
            finally:
                os.close(stdin)
        except OSError:
            processes.release()
            os.close(record)
            raise
        self._count += 1
        return Command(run, call, streams, processes, record, self._count)

    def _free_streams(self) -> Streams:
        """Return pipes that no active command uses. Processes that an earlier command kept may write to them."""
        used = [command.streams for command in self.commands]
        for streams in self._streams:
            if streams not in used:
                return streams
        self._streams.append(Streams(self._loop, self._channel, self._user))
        return self._streams[-1]

    def _shell_ended(self, command: Command, ended: Ended, status: int) -> None:
        if os.WIFSIGNALED(status) and command.never_began and not command.run.stopped:
            self._start_again(command, ended)
            return
        command.shell_ended(self._loop, lambda: self._finish(command, ended, status))

    def _start_again(self, command: Command, ended: Ended) -> None:
        """Run a command in a shell of its own: the one that was started ahead was ended just before."""
        run = command.run
        self.commands.remove(command)
        command.discard()
        run.over_memory = ""  # the waiting shell may have been ended for that
        try:
            self.start(run, ended)
        except RequestRefused as refusal:
            run.refuse(refusal.code, refusal.message)
        except OSError as error:
            run.refuse("no_kernel", f"no process can be started: {error.strerror}")

    def _finish(self, command: Command, ended: Ended, status: int) -> None:
        run = command.run
        record = command.end()
        decides = os.WIFEXITED(status) and not run.stopped and command.number == self._count and not run.rehearsed
        if decides and (note := self._session.take(record, command.call)):
            run.feed("stderr", note.encode())
        self.commands.remove(command)
        ended(run, run.command_ended(status))
        self._loop.later(SPARE_PAUSE_S, self._start_ahead)
