"""The Python kernel: runs cells in one namespace and reports what they show and how they end.

It uses IPython's `InteractiveShell` for magics and rich display. Cells of plain Python, nearly all, bypass IPython's
input machinery, which on an emulated CPU is most of the cost of a short cell.
"""

import _signal  # type: ignore[import-not-found]  # `signal` without its slow enumerations
import ast
import builtins
import gc
import linecache
import os
import site
import socket
import sys
import traceback
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from IPython.core.autocall import IPyAutocall
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from guest.allocator import keep_freed_memory, return_freed_memory
from guest.environment import apply
from guest.errors import ProtocolError
from guest.kernels import display, figures, handlers, libraries, pictures
from guest.kernels.display import Hook, Publisher, Screen
from guest.kernels.handlers import Invocation, run_coroutine
from guest.kernels.libraries import Formatter
from guest.kernels.rehearsal import no_trace
from guest.kernels.reseed import Generators
from guest.kernels.threads import use_cpus
from guest.places import SETTINGS, WORKSPACE
from guest.processes import input_file, open_input, set_soft_limits
from guest.protocol import Decoder, Frame, split_code

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from contextlib import AbstractContextManager

AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # inspect.CO_COROUTINE, without importing inspect
MAX_TRACEBACK = 32 * 1024  # characters; the middle of a longer one is left out
MAX_MESSAGE = 4000  # characters
OWN_FILES = (__file__, *(module.__file__ for module in (display, figures, handlers, libraries, pictures)))
FUTURE_FLAGS = 0x1FF0000  # the compiler flags that `from __future__` sets; they last from cell to cell

INPUT = builtins.input  # before it is replaced


class Exit(IPyAutocall):  # type: ignore[misc]
    """`exit` and `quit`, with or without parentheses."""

    rewrite = False

    def __call__(self, code: object = None) -> NoReturn:
        raise SystemExit(code)


class Shell(InteractiveShell):  # type: ignore[misc]
    """IPython without a terminal: no history, no colours, no threads."""

    def init_history(self) -> None:
        super().init_history()
        self.history_manager.enabled = False

    def init_user_ns(self) -> None:
        super().init_user_ns()
        self.user_ns["exit"] = self.user_ns["quit"] = Exit(self)

    def init_display_pub(self) -> None:
        self.display_pub = Publisher(parent=self, shell=self)
        self.configurables.append(self.display_pub)

    def init_display_formatter(self) -> None:
        self.display_formatter = Formatter(parent=self)
        self.configurables.append(self.display_formatter)

    def init_displayhook(self) -> None:
        self.displayhook = Hook(parent=self, shell=self, cache_size=0)
        self.configurables.append(self.displayhook)

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str, str]:
        """Ignore `%matplotlib`: figures are always shown inline."""
        return gui or "inline", "inline"

    def system(self, cmd: str) -> None:
        """Run `!command` with this process's own output."""
        sys.stdout.flush()
        self.system_raw(cmd)


def no_input(prompt: object = "") -> NoReturn:
    """Replace `input` where there is no standard input."""
    print(prompt, end="", flush=True)  # noqa: T201 - what input() does
    raise EOFError("no stdin was given: pass it with the code, or put the value into the code or a file")


@contextmanager
def standard_input(source: int) -> "Iterator[None]":
    """Let a cell, and the processes it starts, read from a descriptor as standard input."""
    ours = sys.stdin
    become_stdin(source)
    builtins.input, sys.stdin = INPUT, open(0, closefd=False)  # noqa: SIM115 - a descriptor
    try:
        yield
    finally:
        builtins.input, sys.stdin = no_input, ours
        become_stdin(input_file(b""))


def become_stdin(source: int) -> None:
    """Move `source` to descriptor 0. If an earlier cell has closed that, it is `source` itself."""
    os.dup2(source, 0)
    if source:
        os.close(source)
    else:
        os.set_inheritable(0, True)


class Kernel:
    """One namespace, one cell at a time."""

    def __init__(self) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "nocolor"
        config.InteractiveShell.autoawait = False
        config.InteractiveShell.banner1 = ""
        self.shell = Shell.instance(config=config)
        self.shell.builtin_trap.activate()
        builtins.input = no_input
        sys.displayhook = self.shell.displayhook
        self.screen = Screen()
        self.shell.display_pub.screen = self.shell.displayhook.screen = self.screen
        imports = libraries.install(self.screen.show)
        self.figures = figures.install(self.screen, imports)
        self.pictures = pictures.install(imports)
        self.shell.displayhook.is_part = self.figures.is_part
        self.pid = 0
        self._flags = AWAIT
        self._in_cell = False
        self._on_sigint = self._interrupt
        self._generators = Generators()

    # ------------------------------------------------------------ one cell

    def run(self, code: str, number: int, invocation: Invocation | None = None) -> tuple[dict[str, Any], str]:
        """Run a cell and call its handler, if there is one to call; returns the result and the traceback."""
        if _signal.getsignal(_signal.SIGINT) is not self._on_sigint:
            _signal.signal(
                _signal.SIGINT, self._on_sigint
            )  # an earlier cell changed it, and this one must be interruptible
        try:
            self._in_cell = True
            try:
                return self._run(code, number, invocation)
            finally:
                self._in_cell = False
        except KeyboardInterrupt as error:  # after the cell, before `_in_cell` was reset
            return describe(error)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Interrupt the running cell on SIGINT, if there is one."""
        if self._in_cell:
            raise KeyboardInterrupt

    def _run(self, code: str, number: int, invocation: Invocation | None) -> tuple[dict[str, Any], str]:
        events = self.shell.events.callbacks
        try:
            for name in ("pre_execute", "pre_run_cell"):
                if events[name]:
                    self.shell.events.trigger(name, *((None,) if name == "pre_run_cell" else ()))
            self._execute(code, number)
            if invocation is not None:
                invocation.call(self.shell.user_ns)
            ended: tuple[dict[str, Any], str] = {"status": "ok"}, ""
        except SystemExit as error:
            ended = describe_exit(error)
        except BaseException as error:  # the user's code may raise anything
            ended = describe(error)
        if os.getpid() != self.pid:  # a fork by the user's code must not act as the kernel
            self._end_fork(ended)
        if events["post_execute"]:
            self.shell.events.trigger("post_execute")
        self.pictures.end_cell()
        try:
            self.figures.end_cell()
        except Exception as error:  # a figure that cannot be drawn is an error of the user's code
            ended = describe(error) if ended[0]["status"] == "ok" else ended
        flush(sys.stdout)
        flush(sys.stderr)
        return ended

    def _execute(self, code: str, number: int) -> None:
        name = f"<cell {number}>"
        linecache.cache[name] = (len(code), None, f"{code}\n".splitlines(keepends=True), name)
        self.screen.quiet = False
        if (expression := self._expression(code, name)) is not None:
            sys.displayhook(self._evaluate(expression))
            return
        body = self._parse(code, name)
        last = body[-1] if body else None
        if statements := body[:-1] if isinstance(last, ast.Expr) else body:
            self._evaluate(self._compile(ast.Module(statements, []), name, "exec"))
        if isinstance(last, ast.Expr):
            self.screen.quiet = ends_with_semicolon(code)
            sys.displayhook(self._evaluate(self._compile(ast.Expression(last.value), name, "eval")))

    def _expression(self, code: str, name: str) -> CodeType | None:
        """Compile a cell that is one expression on one line without a syntax tree, which is slow; else None."""
        if "\n" in code or self._is_automagic(code) or self.shell.ast_transformers:
            return None
        try:
            return self._compile(code, name, "eval")
        except SyntaxError:
            return None

    def _parse(self, code: str, name: str) -> list[ast.stmt]:
        """Parse the cell's statements. IPython's own syntax (`%magic`, `!command`, `name?`) is not valid Python."""
        tree = None
        if "\n" in code or not self._is_automagic(code):
            with suppress(SyntaxError):
                tree = parse(code, name, self._flags)
        if tree is None:
            tree = parse(self.shell.transform_cell(code), name, self._flags)
        if self.shell.ast_transformers:
            tree = self.shell.transform_ast(tree)
        return tree.body

    def _is_automagic(self, line: str) -> bool:
        """Return whether IPython takes a line as a command, such as `pwd`, `ls -l` or `exit`."""
        words = line.split(None, 1)
        if not words:
            return False
        word = words[0]
        if word in ("exit", "quit"):
            return True
        return word in self.shell.magics_manager.magics["line"] and word not in self.shell.user_ns

    def _compile(self, source: str | ast.Module | ast.Expression, name: str, mode: str) -> CodeType:
        compiled: CodeType = compile(source, name, mode, self._flags, dont_inherit=True)
        self._flags |= compiled.co_flags & FUTURE_FLAGS
        return compiled

    def _evaluate(self, compiled: CodeType) -> object:
        namespace = self.shell.user_ns
        value: object = eval(compiled, namespace)  # noqa: S307 - running code is what this is for
        if compiled.co_flags & COROUTINE:
            value = run_coroutine(cast("Coroutine[Any, Any, object]", value))
        return value

    def _end_fork(self, ended: tuple[dict[str, Any], str]) -> NoReturn:
        try:
            sys.stderr.write(ended[1])
            flush(sys.stdout)
            flush(sys.stderr)
        finally:
            os._exit(int(ended[0].get("exit_code", ended[0]["status"] != "ok")))

    # ------------------------------------------------------------ the agent's requests

    def serve(self, control: socket.socket, figure_count: int) -> None:
        """Serve the agent until it is gone."""
        self.pid = os.getpid()
        self.screen.attach(control, figure_count)
        _signal.signal(_signal.SIGINT, self._on_sigint)
        self._generators.seed()
        self.screen.send({"event": "ready"})
        decoder = Decoder()
        while data := control.recv(65536):
            for frame in decoder.feed(data):
                self._handle(frame)

    def _run_with_options(self, frame: Frame) -> tuple[dict[str, Any], str]:
        """Run a cell that has options."""
        number = frame.header["run"]
        try:
            code, options = split_code(frame.body, frame.header.get("code_bytes"))
            stdin = self._stdin(frame.header, options)
        except (ProtocolError, AttributeError, OSError) as error:  # nested too deeply for this Python, or not text
            return describe(error)
        invocation = Invocation(options, number) if frame.header["kind"] == "invoke" else None
        with stdin:
            ended = self.run(code, number, invocation)
        if invocation is not None and (report := invocation.report()) is not None:
            self.screen.send({"event": "report", "run": number}, report, hold=True)
        return ended

    def _rehearse(self, frame: Frame) -> tuple[dict[str, Any], str]:
        """Run a cell of the warm-up or of a rehearsal, which leaves no trace."""
        flags, last = self._flags, self.shell.displayhook.last
        try:
            with no_trace(self.shell):
                return self.run(frame.body.decode("utf-8", "replace"), 0)
        finally:
            self._flags, self.shell.displayhook.last = flags, last

    def _stdin(self, header: dict[str, Any], options: dict[str, Any]) -> "AbstractContextManager[None]":
        if "stdin" in header:
            return standard_input(open_input(header["stdin"]))
        return (
            standard_input(input_file(options["stdin"].encode("utf-8", "replace")))
            if "stdin" in options
            else nullcontext()
        )

    def _handle(self, frame: Frame) -> None:
        header = frame.header
        if header["op"] == "reseed":
            self._generators.reseed(everything=header.get("everything") is True)
            self.screen.send({"event": "reseeded"})
        if header["op"] == "settle":
            linecache.clearcache()
            gc.collect()
            return_freed_memory()
        if header["op"] == "environment":
            apply(os.environ, header["changes"])
        if header["op"] == "resize":
            set_soft_limits(dict(header["limits"]))
            use_cpus(header["cpus"])
        if header["op"] != "run":
            return  # an acknowledgement of a display that was interrupted
        self._generators.used = True
        self.screen.begin(header["run"], header["max_display_bytes"])
        if header["run"] == 0:
            ended, trace = self._rehearse(frame)
        elif "kind" in header:
            ended, trace = self._run_with_options(frame)
        else:
            ended, trace = self.run(frame.body.decode("utf-8", "replace"), header["run"])
        ended.update(event="done", run=header["run"], figures=self.screen.figures)
        self.screen.send(ended, trace.encode("utf-8", "replace"))


def parse(code: str, name: str, flags: int) -> ast.Module:
    """Return the syntax tree of a cell."""
    tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST | flags, dont_inherit=True)
    return tree


def flush(stream: Any) -> None:  # noqa: ANN401 - the user may have put anything there
    """Flush a stream, whatever the user has done to it."""
    with suppress(Exception):  # the user may have closed or replaced it
        stream.flush()


def ends_with_semicolon(code: str) -> bool:
    """Return whether a semicolon suppresses the value of the last expression."""
    last = code.rstrip()
    if "#" in last[last.rfind("\n") + 1 :]:
        from IPython.core.displayhook import DisplayHook  # loaded already

        return bool(DisplayHook.semicolon_at_end_of_expression(code))
    return last.endswith(";")


def describe_exit(error: SystemExit) -> tuple[dict[str, Any], str]:
    """Return the result of `sys.exit(code)`, as Python itself interprets it."""
    code = error.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        code = 1
    return {"status": "exited", "exit_code": (code or 0) & 0xFF}, ""


def describe(error: BaseException) -> tuple[dict[str, Any], str]:
    """Return the result for an exception, and its traceback without our own frames."""
    name = type(error).__name__
    try:
        message = str(error)[:MAX_MESSAGE]
    except Exception:  # the user's __str__ is broken
        message = "<its message cannot be shown>"
    try:
        report = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
        hide_own_frames(report)
        trace = "".join(report.format())
    except Exception:  # the user's __repr__ is broken, or the recursion limit is reached
        trace = f"{name}: {message}\n"
    if len(trace) > MAX_TRACEBACK:
        half = MAX_TRACEBACK // 2
        trace = f"{trace[:half]}\n[… {len(trace) - MAX_TRACEBACK} characters left out …]\n{trace[-half:]}"
    return {"status": "error", "name": name[:200], "message": message}, trace


def hide_own_frames(report: traceback.TracebackException | None) -> None:
    """Remove our own frames from the whole chain of exceptions."""
    while report is not None:
        report.stack[:] = [frame for frame in report.stack if frame.filename not in OWN_FILES]
        report = report.__cause__ or report.__context__


# ---------------------------------------------------------------- called by the zygote

_kernel: Kernel | None = None


def prepare() -> None:
    """Import and build everything a kernel needs, once, before the first fork."""
    global _kernel  # noqa: PLW0603 - one kernel in each process
    os.environ["IPYTHONDIR"] = SETTINGS
    os.environ.setdefault("POLARS_FMT_MAX_COLS", str(libraries.MAX_COLUMNS))
    os.environ.setdefault("POLARS_TABLE_WIDTH", str(libraries.MAX_WIDTH))
    os.environ["MPLBACKEND"] = f"module://{figures.BACKEND}"
    os.chdir(WORKSPACE)
    keep_freed_memory()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _kernel = Kernel()
    sys.argv = [""]
    sys.path[0] = ""  # the current directory, as in any interpreter


def warm(code: str) -> None:
    """Run warm-up code in its own namespace."""
    exec(compile(code, "<warm-up>", "exec"), {"__name__": "__warmup__"})  # noqa: S102 - the template's own code
    assert _kernel is not None
    _kernel.figures.end_cell()


def find_installed_packages() -> None:
    """Let code import packages that it installs. An interpreter that starts looks only whether the directory exists."""
    if site.ENABLE_USER_SITE is False or "PYTHONUSERBASE" not in os.environ:  # in a virtual environment it is False
        return
    installed = site.getusersitepackages()
    with suppress(OSError):
        os.makedirs(installed, exist_ok=True)  # noqa: PTH103 - pathlib is slow to load
    if installed not in sys.path:  # before the template's packages, as in any interpreter
        place = next((n for n, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
        sys.path.insert(place, installed)


def serve(control_fd: int, figure_count: int) -> None:
    """Run code as the kernel of this process."""
    assert _kernel is not None
    kernel = _kernel
    find_installed_packages()
    for name in [name for name in sys.modules if name == "guest" or name.startswith("guest.")]:
        del sys.modules[name]  # the user may have a module with this name
    kernel.serve(socket.socket(fileno=control_fd), figure_count)
