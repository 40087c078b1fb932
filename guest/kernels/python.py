"""The Python kernel: runs cells in one namespace and reports what they show, how they end, and why.

Built on IPython's `InteractiveShell` for its magics and rich display. Cells that are plain Python, nearly all,
skip IPython's input machinery: on an emulated CPU that is most of the cost of a short cell.
"""

import _signal  # type: ignore[import-not-found]  # `signal` without its enumerations, which are slow
import ast
import builtins
import linecache
import os
import socket
import sys
import traceback
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from IPython.core.autocall import IPyAutocall
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from guest.errors import ProtocolError
from guest.kernels import handlers
from guest.kernels.display import Hook, Publisher, Screen
from guest.kernels.figures import BACKEND, install
from guest.kernels.handlers import Invocation, run_coroutine
from guest.kernels.orders import split
from guest.kernels.reseed import Generators
from guest.places import SETTINGS, WORKSPACE
from guest.programs import as_file
from guest.protocol import Decoder, Frame

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
COROUTINE = 0x80  # inspect.CO_COROUTINE, without importing inspect
MAX_TRACEBACK = 32 * 1024  # characters; the middle of a longer one is left out
MAX_MESSAGE = 4000  # characters
OWN_FILES = (__file__, handlers.__file__)
FUTURE_FLAGS = 0x1FF0000  # the compiler flags `from __future__` sets; they last from cell to cell


INPUT = builtins.input  # before IPython or we put anything in its place


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

    def init_displayhook(self) -> None:
        self.displayhook = Hook(parent=self, shell=self, cache_size=0)
        self.configurables.append(self.displayhook)

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str, str]:
        """`%matplotlib`: it is on, and inline, whatever is asked for."""
        return gui or "inline", "inline"

    def system(self, cmd: str) -> None:
        """`!command`: straight to this process's own output."""
        sys.stdout.flush()
        self.system_raw(cmd)


def no_input(prompt: object = "") -> NoReturn:
    """Stands in for `input`: there is nobody to answer."""
    print(prompt, end="", flush=True)  # noqa: T201 - what input() does
    raise EOFError("there is no stdin: give it with the code, or put the value into the code or into a file")


@contextmanager
def standard_input(text: str) -> "Iterator[None]":
    """Let a cell, and the processes it starts, read `text`."""
    ours = sys.stdin
    become_stdin(as_file(text.encode("utf-8", "replace")))
    builtins.input, sys.stdin = INPUT, open(0, closefd=False)  # noqa: SIM115 - a descriptor
    try:
        yield
    finally:
        builtins.input, sys.stdin = no_input, ours
        become_stdin(as_file(b""))


def become_stdin(source: int) -> None:
    """Have descriptor 0 lead to `source`, and only that. An earlier cell may have closed it: then it is `source`."""
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
        self.figures = install(self.shell, self.screen)
        self.pid = 0
        self._flags = AWAIT
        self._in_cell = False
        self._on_sigint = self._interrupt
        self._generators = Generators()

    # ------------------------------------------------------------ one cell

    def run(self, code: str, number: int, invocation: Invocation | None = None) -> tuple[dict[str, Any], str]:
        """Run a cell, and call the handler that it leaves; returns how it ended and the traceback."""
        if _signal.getsignal(_signal.SIGINT) is not self._on_sigint:
            _signal.signal(_signal.SIGINT, self._on_sigint)  # an earlier cell changed it; this one can be stopped
        try:
            self._in_cell = True
            try:
                return self._run(code, number, invocation)
            finally:
                self._in_cell = False
        except KeyboardInterrupt as error:  # between the cell's own handling and here
            return describe(error)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """SIGINT: stop the cell, if one is running."""
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
        if os.getpid() != self.pid:  # a fork of the user's that came back: it must not speak as the kernel
            self._end_fork(ended)
        if events["post_execute"]:
            self.shell.events.trigger("post_execute")
        self.figures.end_cell()
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
        """A cell that is one line and one expression needs no syntax tree, which would cost more than all the rest."""
        if "\n" in code or self._is_automagic(code) or self.shell.ast_transformers:
            return None
        try:
            return self._compile(code, name, "eval")
        except SyntaxError:
            return None

    def _parse(self, code: str, name: str) -> list[ast.stmt]:
        """The cell's statements. IPython's own syntax (`%magic`, `!command`, `name?`) is not valid Python."""
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
        """`pwd`, `ls -l`, `exit`: IPython takes them as commands unless the user has a variable of that name."""
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

    # ------------------------------------------------------------ the agent's orders

    def serve(self, control: socket.socket, figures: int) -> None:
        """Run cells for the agent until it is gone."""
        self.pid = os.getpid()
        self.screen.attach(control, figures)
        _signal.signal(_signal.SIGINT, self._on_sigint)
        self._generators.seed()
        self.screen.send({"event": "ready"})
        decoder = Decoder()
        while data := control.recv(65536):
            for frame in decoder.feed(data):
                self._obey(frame)

    def _run_with_options(self, frame: Frame) -> tuple[dict[str, Any], str]:
        """Run a cell that there is more to than its code."""
        number = frame.header["run"]
        try:
            code, options = split(frame)
        except ProtocolError as error:  # nested deeper than this Python reads
            return describe(error)
        invocation = Invocation(options, number) if frame.header["kind"] == "invoke" else None
        with standard_input(options["stdin"]) if "stdin" in options else nullcontext():
            ended = self.run(code, number, invocation)
        if invocation is not None and (report := invocation.report()) is not None:
            self.screen.send({"event": "report", "run": number}, report, hold=True)
        return ended

    def _obey(self, frame: Frame) -> None:
        header = frame.header
        if header["op"] == "reseed":
            self._generators.reseed()
            self.screen.send({"event": "reseeded"})
        if header["op"] != "run":
            return  # an acknowledgement that an interrupted display did not wait for
        self._generators.used |= header["run"] > 0  # the cells of the warm-up draw nothing
        self.screen.begin(header["run"], header["max_display_bytes"])
        if "kind" in header:
            ended, trace = self._run_with_options(frame)
        else:
            ended, trace = self.run(frame.body.decode("utf-8", "replace"), header["run"])
        ended.update(event="done", run=header["run"], figures=self.screen.figures)
        self.screen.send(ended, trace.encode("utf-8", "replace"))


def parse(code: str, name: str, flags: int) -> ast.Module:
    """The syntax tree of a cell."""
    tree: ast.Module = compile(code, name, "exec", ast.PyCF_ONLY_AST | flags, dont_inherit=True)
    return tree


def flush(stream: Any) -> None:  # noqa: ANN401 - the user may have put anything there
    """Write out what a stream holds back, whatever the user has done to it."""
    with suppress(Exception):  # a closed or replaced stream is the user's affair
        stream.flush()


def ends_with_semicolon(code: str) -> bool:
    """Whether the last expression is meant not to be shown."""
    last = code.rstrip()
    if "#" in last[last.rfind("\n") + 1 :]:
        from IPython.core.displayhook import DisplayHook  # loaded already

        return bool(DisplayHook.semicolon_at_end_of_expression(code))
    return last.endswith(";")


def describe_exit(error: SystemExit) -> tuple[dict[str, Any], str]:
    """What `sys.exit(code)` means, as Python itself takes it."""
    code = error.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201 - what the interpreter does
        code = 1
    return {"status": "exited", "exit_code": (code or 0) & 0xFF}, ""


def describe(error: BaseException) -> tuple[dict[str, Any], str]:
    """An exception as the caller gets it: name, message, and the traceback from the user's frames on."""
    name = type(error).__name__
    try:
        message = str(error)[:MAX_MESSAGE]
    except Exception:  # a broken __str__ is the user's
        message = "<its message cannot be shown>"
    try:
        report = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
        hide_own_frames(report)
        trace = "".join(report.format())
    except Exception:  # so is a broken __repr__ or a recursion at its limit
        trace = f"{name}: {message}\n"
    if len(trace) > MAX_TRACEBACK:
        half = MAX_TRACEBACK // 2
        trace = f"{trace[:half]}\n[… {len(trace) - MAX_TRACEBACK} characters left out …]\n{trace[-half:]}"
    return {"status": "error", "name": name[:200], "message": message}, trace


def hide_own_frames(report: traceback.TracebackException | None) -> None:
    """Leave only the user's frames and those of libraries, in the whole chain of exceptions."""
    while report is not None:
        report.stack[:] = [frame for frame in report.stack if frame.filename not in OWN_FILES]
        report = report.__cause__ or report.__context__


# ---------------------------------------------------------------- what the zygote calls

_kernel: Kernel | None = None


def prepare() -> None:
    """Import and build everything a kernel needs, once, before any is forked."""
    global _kernel  # noqa: PLW0603 - one kernel a process, by nature
    os.environ["IPYTHONDIR"] = SETTINGS
    os.environ["MPLBACKEND"] = f"module://{BACKEND}"
    os.chdir(WORKSPACE)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _kernel = Kernel()
    sys.argv = [""]
    sys.path[0] = ""  # the directory the user is in, as in any interpreter


def warm(code: str) -> None:
    """Run warm-up code in a namespace of its own."""
    exec(compile(code, "<warm-up>", "exec"), {"__name__": "__warmup__"})  # noqa: S102 - the template's own code
    assert _kernel is not None
    _kernel.figures.end_cell()


def serve(control_fd: int, figures: int) -> None:
    """Be the live kernel of this process."""
    assert _kernel is not None
    kernel = _kernel
    for name in [name for name in sys.modules if name == "guest" or name.startswith("guest.")]:
        del sys.modules[name]  # the user may have a module of that name
    kernel.serve(socket.socket(fileno=control_fd), figures)
