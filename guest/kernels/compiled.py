"""The kernel of languages that are compiled first: one program a run, or one program and many test cases.

It keeps no state but files. A run leaves nothing in the user's directory that the program did not write itself.
"""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH101, PTH103, PTH108, PTH123

import errno
import os
import re
import resource
import shutil
import socket
import stat
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Protocol

from guest.kernels.cases import DEFAULT_TIMEOUT_S, cut, ran_out_of_memory, run_cases
from guest.kernels.orders import split
from guest.kernels.process import Ended, Program, Runner
from guest.places import BUILD, WORKSPACE
from guest.protocol import Decoder, Frame, encode, encode_json

PROGRAM = f"{BUILD}/program"
NOT_RUN = 126  # the exit code of what could not be started, as shells have it
SAID_BYTES = 256 * 1024  # kept of what a compiler says
SAID_ROOM = 48 * 1024  # of a report, as JSON
CHECKER_PATIENCE_S = 3.0  # after the program has ended; its findings are not worth more
STACK_BYTES = 256 * 1024 * 1024  # deep recursion is common in algorithms; only what is used is taken
# How go begins what it says of a single file.
NAMELESS_PACKAGE = re.compile(r"^# \[?command-line-arguments\]?\n", re.MULTILINE)
MIB = 1024 * 1024


class Source(NamedTuple):
    """Code as it is compiled."""

    text: str
    note: str = ""  # what was changed, in words for its author


class Toolchain(Protocol):
    """What is special about one language."""

    compiler: str
    source: str  # where the code lies for the compiler

    def complete(self, code: str) -> Source:
        """The code as a whole file."""

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """What makes the program from the source."""

    def told(self, command: list[str]) -> str:
        """That command, as people would write it."""

    def checker(self) -> list[str] | None:
        """What looks for mistakes that a compiler does not mind."""

    def without_main(self, said: str) -> str | None:
        """What the compiler said if nothing but a main function is missing; None if that is not so."""


class Compiled(NamedTuple):
    """What came of the first step."""

    ended: Ended
    command: list[str]
    diagnostics: str
    runnable: bool
    check: bool  # it went well, and there is nothing to run


class Kernel:
    """Compiles and runs, one order at a time."""

    def __init__(self, toolchain: Toolchain) -> None:
        self._toolchain = toolchain
        self._runner = Runner()
        resident = resource.getrlimit(resource.RLIMIT_RSS)[0]  # see `User.become`
        self._memory_bytes = None if resident == resource.RLIM_INFINITY else resident

    def serve(self, control: socket.socket) -> None:
        """Work for the agent until it is gone."""
        control.set_inheritable(False)
        control.sendall(encode({"event": "ready"}))
        decoder = Decoder()
        while data := control.recv(65536):
            for frame in decoder.feed(data):
                if frame.header["op"] == "reseed":  # every program draws its own numbers
                    control.sendall(encode({"event": "reseeded"}))
                elif frame.header["op"] == "run":
                    control.sendall(self._obey(frame))

    def _obey(self, frame: Frame) -> bytes:
        header = frame.header
        code, options = split(frame)
        self._runner.begin()
        try:
            report, ended = self.run(code, options)
        except OSError as error:  # the disk is full, or there are too many processes
            if error.errno == errno.EAGAIN:
                make_room()
            report, ended = None, failed("CannotRun", f"the code could not be compiled or run: {error}")
            self._runner.begin()
        done = encode({**ended, "event": "done", "run": header["run"]})
        if report is None:
            return done
        return encode({"event": "report", "run": header["run"]}, encode_json({"kind": "compiled", **report})) + done

    def run(self, code: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Compile code and run it; gives a report, and how it ended.

        Raises:
            OSError: something could not be written or started.
        """
        source = self._toolchain.complete(code)
        compiled, checker = self._compile(source, options)
        report: dict[str, Any] = {
            "phase": "check" if compiled.check else "run" if compiled.runnable else "compile",
            "command": cut(self._plain(self._toolchain.told(compiled.command)), SAID_ROOM),
            "compile_ms": compiled.ended.wall_ns // 10**6,
            "diagnostics": cut(self._plain(compiled.diagnostics), SAID_ROOM),
            "note": source.note,
            "warnings": "",
            "end": None,
            "cases": [],
        }
        if compiled.runnable:
            ended = self._run(report, options)
        else:
            ended = {"status": "ok"} if compiled.check else self._not_compiled(compiled.ended)
        report["warnings"] = self._findings(checker, wanted=compiled.runnable or compiled.check)
        return report, ended

    # ------------------------------------------------------------ the steps

    def _compile(self, source: Source, options: dict[str, Any]) -> tuple[Compiled, Program | None]:
        empty(BUILD)
        with open(self._toolchain.source, "w", encoding="utf-8", errors="replace") as file:
            file.write(source.text)
        check = self._toolchain.checker()
        checker = None if check is None else self._runner.start(check, keep=SAID_BYTES)  # it works beside the compiler
        command = self._toolchain.command(options.get("flags"), options.get("sanitize") or [])
        ended = self._runner.run(command, keep=SAID_BYTES, memory_bytes=self._memory_bytes)
        said = (ended.stdout + ended.stderr).decode("utf-8", "replace")
        good = ended.exit_code == 0 and not ended.cause
        if not good and (rest := self._toolchain.without_main(said)) is not None:
            return Compiled(ended, command, rest, runnable=False, check=True), checker
        runnable = good and os.access(PROGRAM, os.X_OK)
        return Compiled(ended, command, said, runnable=runnable, check=good and not runnable), checker

    def _run(self, report: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        asked = options.get("memory_limit_mb")
        memory_bytes = self._memory_bytes if asked is None else asked * MIB
        if options.get("cases"):
            timeout_s = options.get("case_timeout_s") or DEFAULT_TIMEOUT_S
            report["cases"] = run_cases(self._runner, [PROGRAM], options["cases"], timeout_s, memory_bytes)
            return failed("Interrupted", "stopped before all cases were run") if self._runner.interrupted else OK
        stdin = (options.get("stdin") or "").encode("utf-8", "replace")
        ended = self._runner.run([PROGRAM], stdin=stdin, memory_bytes=memory_bytes)
        report["end"] = ended.measured()
        if ended.cause == "interrupted":
            return failed("Interrupted", "the program was stopped")
        if ran_out_of_memory(ended, memory_bytes):
            return failed("MemoryLimitExceeded", out_of_memory("the program", ended, memory_bytes))
        if ended.signal is not None:
            return {"status": "killed", "signal": ended.signal}
        return OK if ended.exit_code == 0 else {"status": "exited", "exit_code": ended.exit_code}

    def _not_compiled(self, ended: Ended) -> dict[str, Any]:
        name = self._toolchain.compiler
        if ended.cause == "interrupted":
            return failed("Interrupted", f"{name} was stopped")
        if ran_out_of_memory(ended, self._memory_bytes):
            return failed("CompileError", out_of_memory(name, ended, self._memory_bytes))
        how = f"exit code {ended.exit_code}" if ended.signal is None else ended.signal
        return failed("CompileError", f"{name} ended with {how}")

    def _findings(self, checker: Program | None, *, wanted: bool) -> str:
        """What a checker has to say of code that compiles; of other code the compiler has said it all."""
        if checker is None:
            return ""
        ended = self._runner.wait(checker, wall_s=CHECKER_PATIENCE_S if wanted else 0)
        if not wanted or ended.cause == "interrupted" or ended.exit_code == 0:
            return ""
        if ended.cause:
            return "the checker was not done in time"
        return cut(self._plain(ended.stderr.decode("utf-8", "replace")), SAID_ROOM)

    def _plain(self, said: str) -> str:
        """Messages without the places and names of things that the user does not know."""
        for place in (os.path.relpath(BUILD), BUILD):
            said = said.replace(f"{place}/", "")
        return NAMELESS_PACKAGE.sub("", said)


OK = {"status": "ok"}


def failed(name: str, message: str) -> dict[str, Any]:
    """An end that is an error."""
    return {"status": "error", "name": name, "message": message}


def out_of_memory(who: str, ended: Ended, memory_bytes: int | None) -> str:
    """How a process ran out of memory."""
    if memory_bytes is None or (ended.cause != "memory" and ended.peak_bytes <= memory_bytes):
        return f"{who} was killed, most likely because the sandbox ran out of memory"
    return f"{who} used more than {memory_bytes // MIB} MB"


def make_room() -> NoReturn:
    """End this kernel, as there is no room for one more process: before the next one starts, all others are ended."""
    os.write(
        2, b"mcp-sandbox: the sandbox was full of processes, so nothing could run. They were ended: run it again.\n"
    )
    os._exit(NOT_RUN)


def empty(folder: str) -> None:
    """Make a directory and remove what earlier runs have left in it, or in its place."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            os.unlink(folder)
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o700)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


# ---------------------------------------------------------------- what the modules of the languages are made of


def prepare(toolchain: Toolchain) -> None:
    """Settle in the user's directory. A machine without the compiler is told so when its template is built."""
    os.environ.pop("PYTHONPATH", None)
    os.environ["TMPDIR"] = BUILD  # what a killed compiler leaves goes before the next run
    os.chdir(WORKSPACE)
    if shutil.which(toolchain.compiler) is None:
        raise SystemExit(f"there is no {toolchain.compiler} in this machine: add its package to the template")


def warm(toolchain: Toolchain, code: str) -> None:
    """Compile and run warm-up code."""
    if not code.strip():
        return
    report, ended = Kernel(toolchain).run(code, {})
    if ended != OK:
        raise RuntimeError(f"{ended}\n{report['diagnostics']}")


def serve(toolchain: Toolchain, control_fd: int) -> None:
    """Be the live kernel of this process."""
    limit(resource.RLIMIT_STACK, STACK_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    Kernel(toolchain).serve(socket.socket(fileno=control_fd))


def limit(kind: int, value: int) -> None:
    """Set a limit, or come as near to it as we may."""
    hard = resource.getrlimit(kind)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
