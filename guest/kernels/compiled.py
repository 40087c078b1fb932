"""The kernel of compiled languages: each run compiles a program and runs it, once or with many test cases.

It keeps no state but files. A run leaves nothing in the user's directory but what the program writes there.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH101, PTH103, PTH108, PTH123

import errno
import os
import re
import resource
import shutil
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Protocol

from guest.environment import apply
from guest.kernels.cases import DEFAULT_TIMEOUT_S, cut, finding, ran_out_of_memory, run_cases
from guest.kernels.runner import Ended, Program, Runner
from guest.places import BUILD, WORKSPACE
from guest.processes import open_input, set_soft_limits
from guest.protocol import Decoder, Frame, encode, encode_json, split_code
from guest.trees import empty_folder

PROGRAM = f"{BUILD}/program"
NOT_RUN = 126  # the exit code of shells for what could not be started
MESSAGE_BYTES = 256 * 1024  # kept of the messages of a compiler
MESSAGE_ROOM = 48 * 1024  # bytes of a report for them, as JSON
CHECKER_TIMEOUT_S = 3.0  # after the program has ended
STACK_BYTES = 256 * 1024 * 1024  # deep recursion is common in algorithms; only the used part takes memory
# How messages of the go command about a single file begin.
NAMELESS_PACKAGE = re.compile(r"^# \[?command-line-arguments\]?\n", re.MULTILINE)
MIB = 1024 * 1024


class Source(NamedTuple):
    """Code as it is compiled."""

    text: str
    note: str = ""  # tells its author what was changed


class Toolchain(Protocol):
    """What differs between languages."""

    compiler: str
    source: str  # the path of the code

    def prepare(self) -> None:
        """Find what it needs, once."""

    def complete(self, code: str) -> Source:
        """Return the code as a complete source file."""

    def command(self, flags: list[str] | None, sanitize: list[str]) -> list[str]:
        """Return the command that compiles the source into the program."""

    def shown(self, command: list[str]) -> str:
        """Return that command as people would write it."""

    def checker(self) -> list[str] | None:
        """Return a command that finds mistakes which the compiler accepts, if the language has one."""

    def without_main(self, messages: str) -> str | None:
        """Return the compiler's messages if only a main function is missing; else None."""

    def program(self, memory_bytes: int | None) -> list[str] | None:
        """Return the command that runs what was compiled with this much memory; None if there is no program."""


class Compiled(NamedTuple):
    """The outcome of compiling."""

    ended: Ended
    command: list[str]
    diagnostics: str
    runnable: bool
    check: bool  # it compiles, and there is nothing to run


class Kernel:
    """Compiles and runs, one request at a time."""

    def __init__(self, toolchain: Toolchain) -> None:
        self._toolchain = toolchain
        self._runner = Runner()

    @property
    def _memory_bytes(self) -> int | None:
        """How much memory the machine has for a program, see `User.soft_limits`; None: no limit is known."""
        resident = resource.getrlimit(resource.RLIMIT_RSS)[0]
        return None if resident == resource.RLIM_INFINITY else resident

    def serve(self, control: socket.socket) -> None:
        """Serve the agent until it is gone."""
        control.set_inheritable(False)
        control.sendall(encode({"event": "ready"}))
        decoder = Decoder()
        while data := control.recv(65536):
            for frame in decoder.feed(data):
                if frame.header["op"] == "reseed":  # every program seeds its own generators
                    control.sendall(encode({"event": "reseeded"}))
                elif frame.header["op"] == "environment":
                    apply(os.environ, frame.header["changes"])
                elif frame.header["op"] == "resize":
                    set_soft_limits(dict(frame.header["limits"]))
                elif frame.header["op"] == "run":
                    control.sendall(self._answer(frame))

    def _answer(self, frame: Frame) -> bytes:
        header = frame.header
        self._runner.begin()
        try:
            code, options = split_code(frame.body, header.get("code_bytes"))
            report, ended = self.run(code, options, stdin=header.get("stdin"))
        except Exception as error:  # the disk is full, there are too many processes, an option makes no sense, …
            if isinstance(error, OSError) and error.errno == errno.EAGAIN:
                end_kernel()
            report, ended = None, failed("CannotRun", f"the code could not be compiled or run: {error}")
            self._runner.begin()
        done = encode({**ended, "event": "done", "run": header["run"]})
        if report is None:
            return done
        return encode({"event": "report", "run": header["run"]}, encode_json({"kind": "compiled", **report})) + done

    def run(
        self, code: str, options: dict[str, Any], stdin: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Compile code and run it; returns a report and how it ended. `stdin` is the path of its open input.

        Raises:
            OSError: something could not be written or started.
        """
        source = self._toolchain.complete(code)
        compiled, checker = self._compile(source, options)
        report: dict[str, Any] = {
            "phase": "check" if compiled.check else "run" if compiled.runnable else "compile",
            "command": cut(self._plain(self._toolchain.shown(compiled.command)), MESSAGE_ROOM),
            "compile_ms": compiled.ended.wall_ns // 10**6,
            "diagnostics": cut(self._plain(compiled.diagnostics), MESSAGE_ROOM),
            "note": source.note,
            "warnings": "",
            "end": None,
            "cases": [],
        }
        if compiled.runnable:
            ended = self._run(report, options, stdin)
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
        checker = None if check is None else self._runner.start(check, keep=MESSAGE_BYTES)  # beside the compiler
        command = self._toolchain.command(options.get("flags"), options.get("sanitize") or [])
        ended = self._runner.run(command, keep=MESSAGE_BYTES, memory_bytes=self._memory_bytes)
        messages = (ended.stdout + ended.stderr).decode("utf-8", "replace")
        good = ended.exit_code == 0 and not ended.cause
        if not good and (rest := self._toolchain.without_main(messages)) is not None:
            return Compiled(ended, command, rest, runnable=False, check=True), checker
        runnable = good and self._toolchain.program(None) is not None
        return Compiled(ended, command, messages, runnable=runnable, check=good and not runnable), checker

    def _run(self, report: dict[str, Any], options: dict[str, Any], path: str | None) -> dict[str, Any]:
        asked = options.get("memory_limit_mb")
        memory_bytes = self._memory_bytes if asked is None else asked * MIB
        program = self._toolchain.program(memory_bytes) or [PROGRAM]
        if options.get("cases"):
            timeout_s = options.get("case_timeout_s") or DEFAULT_TIMEOUT_S
            report["cases"] = run_cases(self._runner, program, options["cases"], timeout_s, memory_bytes)
            return self._cases_ended([case["verdict"] for case in report["cases"]])
        stdin = (options.get("stdin") or "").encode("utf-8", "replace") if path is None else open_input(path)
        ended = self._runner.run(program, stdin=stdin, memory_bytes=memory_bytes)
        report["end"] = ended.measured()
        if ended.cause == "interrupted":
            return failed("Interrupted", "the program was stopped")
        if ran_out_of_memory(ended, memory_bytes):
            return failed("MemoryLimitExceeded", out_of_memory("the program", ended, memory_bytes))
        if found := finding(ended):
            return failed("SanitizerFinding", self._plain(found))
        if ended.signal is not None:
            return {"status": "killed", "signal": ended.signal}
        return OK if ended.exit_code == 0 else {"status": "exited", "exit_code": ended.exit_code}

    def _cases_ended(self, verdicts: list[str]) -> dict[str, Any]:
        if self._runner.interrupted:
            return failed("Interrupted", "stopped before all cases were run")
        if found := verdicts.count("sanitizer finding"):
            return failed("SanitizerFinding", f"in {found} of {len(verdicts)} cases")
        return OK

    def _not_compiled(self, ended: Ended) -> dict[str, Any]:
        name = self._toolchain.compiler
        if ended.cause == "interrupted":
            return failed("Interrupted", f"{name} was stopped")
        if ran_out_of_memory(ended, self._memory_bytes):
            return failed("CompileError", out_of_memory(name, ended, self._memory_bytes))
        how = f"exit code {ended.exit_code}" if ended.signal is None else ended.signal
        return failed("CompileError", f"{name} ended with {how}")

    def _findings(self, checker: Program | None, *, wanted: bool) -> str:
        """Return the findings of a checker for code that compiles; other code has the compiler's errors."""
        if checker is None:
            return ""
        ended = self._runner.wait(checker, wall_s=CHECKER_TIMEOUT_S if wanted else 0)
        if not wanted or ended.cause == "interrupted" or ended.exit_code == 0:
            return ""
        if ended.cause:
            return "the checker did not finish in time"
        return cut(self._plain(ended.stderr.decode("utf-8", "replace")), MESSAGE_ROOM)

    def _plain(self, messages: str) -> str:
        """Return messages without paths and names that mean nothing to the user."""
        for place in (os.path.relpath(BUILD), BUILD):
            messages = messages.replace(f"{place}/", "")
        return NAMELESS_PACKAGE.sub("", messages)


OK = {"status": "ok"}


def linked_program() -> list[str] | None:
    """Return the command that runs a program which the linker has made."""
    return [PROGRAM] if os.access(PROGRAM, os.X_OK) else None


def failed(name: str, message: str) -> dict[str, Any]:
    """Return the result of a run that failed."""
    return {"status": "error", "name": name, "message": message}


def out_of_memory(who: str, ended: Ended, memory_bytes: int | None) -> str:
    """Describe how a process ran out of memory."""
    if memory_bytes is not None and (ended.cause == "memory" or ended.peak_bytes > memory_bytes):
        return f"{who} used more than {memory_bytes // MIB} MB"
    if ended.oom_killed:
        return f"{who} was killed because the sandbox ran out of memory"
    return f"{who} could not allocate more memory"


def end_kernel() -> NoReturn:
    """End this kernel because no more processes can be started: the agent ends all others before the next kernel."""
    os.write(
        2, b"mcp-sandbox: the sandbox was full of processes, so nothing could run. They were ended: run it again.\n"
    )
    os._exit(NOT_RUN)


def empty(folder: str) -> None:
    """Create an empty directory, whatever earlier runs have left in it or in its place."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            os.unlink(folder)
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o700)
    empty_folder(folder)


class Service:
    """A compiled language as the zygote uses it."""

    def __init__(self, toolchain: Toolchain, environment: Mapping[str, str] | None = None) -> None:
        self._toolchain = toolchain
        self._environment = environment or {}

    def prepare(self) -> None:
        """Set up the environment. Without the compiler the template's build fails."""
        os.environ.pop("PYTHONPATH", None)
        os.environ["TMPDIR"] = BUILD  # so that what a killed compiler leaves is removed before the next run
        for name, value in self._environment.items():
            os.environ.setdefault(name, value)
        os.chdir(WORKSPACE)
        compiler = self._toolchain.compiler
        if shutil.which(compiler) is None:
            raise SystemExit(f"there is no {compiler} in this machine: add its package to the template")
        self._toolchain.prepare()

    def warm(self, code: str) -> None:
        """Compile and run warm-up code."""
        if not code.strip():
            return
        report, ended = Kernel(self._toolchain).run(code, {})
        if ended != OK:
            raise RuntimeError(f"{ended}\n{report['diagnostics']}")

    def serve(self, control_fd: int, _figures: int) -> None:
        """Run code as the kernel of this process."""
        set_soft_limits({resource.RLIMIT_STACK: STACK_BYTES, resource.RLIMIT_CORE: 0})
        Kernel(self._toolchain).serve(socket.socket(fileno=control_fd))
