"""The kernel of languages with an interpreter of their own: it runs a host program written in that language.

Each message between the two is a line, with a word and the sizes of the parts that follow it:

    orders on descriptor 3   run NUMBER CODE ROUND   seed HEX   set NAME VALUE   unset NAME
    events on descriptor 4   ready   show MIME DATA …   done   exited CODE   error NAME MESSAGE TRACE

The interpreter writes straight into the agent's pipes, and its standard input is a file that this process fills. The
agent interrupts both processes. Descriptor 5 also gets a byte then, for an interpreter that handles no signals while
code runs. An interrupt may come too late for its run: the next run begins a new round, and a zero on descriptor 5
separates the interrupts of two rounds.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103, PTH107, PTH123, PTH208

import fcntl
import os
import re
import resource
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from guest.environment import apply
from guest.errors import ProtocolError
from guest.forms import PDF, PICTURES, SVG
from guest.places import OUTPUTS, WORKSPACE
from guest.processes import DEFAULT_SIGNALS, set_soft_limits
from guest.protocol import MAX_BODY, Decoder, Frame, encode, encode_json, split_code

FILE_TYPES = {**PICTURES, SVG: "svg", PDF: "pdf"}
FIGURE_NAME = re.compile(r"figure-(\d+)\.")
MAX_TEXT = 64 * 1024  # characters of one form of one value
MAX_NAME, MAX_MESSAGE, MAX_TRACE = 200, 4000, 32 * 1024  # characters of an error
FIRST_FREE_FD = 10  # above the descriptors that an interpreter gets
NEW_ROUND = b"\0"
PIPE_BYTES = 65536  # that a pipe holds
ACK_BYTES = 256  # more than an acknowledgement has; nothing else arrives during a run
SEED_BYTES = 16
MIB = 1024 * 1024
ALL_AT_ONCE = "code in this language gets all of its input before it runs: pass stdin instead of stdin_open"

Command = Callable[[int], list[str]]
Result = tuple[dict[str, Any], str]  # and the traceback


class Event(NamedTuple):
    """A message of the interpreter."""

    word: str
    parts: list[bytes]

    def text(self, index: int, most: int) -> str:
        """Return a part as text; empty if there is no such part."""
        return self.parts[index].decode("utf-8", "replace")[:most] if index < len(self.parts) else ""


class Interpreter:
    """A running host program."""

    def __init__(self, command: list[str], stdin: int, interrupts: int) -> None:
        """Start it. Raises OSError."""
        theirs_in, self._orders = os.pipe2(os.O_CLOEXEC)
        events, theirs_out = os.pipe2(os.O_CLOEXEC)
        sources = [_moved(fd) for fd in (os.dup(stdin), theirs_in, theirs_out, os.dup(interrupts))]
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(sources, (0, 3, 4, 5), strict=True)]
        self.pid = os.posix_spawnp(
            command[0], command, os.environ, file_actions=actions, setsigdef=[*DEFAULT_SIGNALS, signal.SIGTERM]
        )
        for fd in sources:
            os.close(fd)
        self._events = open(events, "rb")  # noqa: SIM115 - closed with the interpreter

    def order(self, word: str, *parts: str) -> None:
        """Send an order. Raises OSError if the interpreter has ended."""
        data = [part.encode("utf-8", "replace") for part in parts]
        with open(self._orders, "wb", closefd=False) as file:
            file.write(b" ".join([word.encode(), *(str(len(part)).encode() for part in data)]) + b"\n" + b"".join(data))

    def event(self) -> Event:
        """Return the next event. Raises EOFError if the interpreter has ended."""
        words = self._events.readline().split()
        if not words:
            raise EOFError
        return Event(words[0].decode("ascii", "replace"), [self._events.read(int(size)) for size in words[1:]])

    def end(self) -> int:
        """Wait until it has ended, after it has closed its pipe; returns a status as `waitpid` gives it."""
        os.close(self._orders)
        self._events.close()
        return os.waitpid(self.pid, 0)[1]

    def kill(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()


class Kernel:
    """One interpreter, one run at a time."""

    def __init__(self, command: Command, warm_up: str, *, restarts: bool) -> None:
        self._command = command
        self._warm_up = warm_up
        self._restarts = restarts
        self._stdin = os.memfd_create("stdin")
        self._interrupts, self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGINT, self._note_interrupt)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._control: socket.socket | None = None
        self._figures = self._left = 0
        self._used = False  # code of the sandbox's owner has run
        self._interpreter = self._start()

    def _start(self) -> Interpreter:
        self._ready = self._warm = self._interrupted = False
        self._round = 0
        with suppress(BlockingIOError):
            os.read(self._interrupts, PIPE_BYTES)  # interrupts of the last interpreter
        resident = resource.getrlimit(resource.RLIMIT_RSS)[0]  # see `User.soft_limits`
        memory_mb = 0 if resident == resource.RLIM_INFINITY else resident // MIB
        return Interpreter(self._command(memory_mb), self._stdin, self._interrupts)

    def get_ready(self) -> Result | None:
        """Wait for the interpreter, and run the template's warm-up code in a new one; returns how that failed, if so.

        Code cannot do without it, so the next call tries again.
        """
        if not self._ready:
            self._next()
            self._ready = True
        if not self._warm and self._warm_up.strip():
            ended, trace = self.run(0, self._warm_up, None)
            if ended["status"] != "ok":
                why = (
                    f"{ended['name']}: {ended['message']}"
                    if "name" in ended
                    else f"it exited with {ended['exit_code']}"
                )
                return _error("WarmUpFailed", f"the template's warm-up code failed: {why}"), trace
        self._warm = True
        return None

    def serve(self, control: socket.socket, figures: int) -> None:
        """Serve the agent until it is gone."""
        control.set_inheritable(False)
        self._figures = figures
        self.get_ready()  # if it fails, the first run tells
        self._control = control
        control.sendall(encode({"event": "ready"}))
        decoder = Decoder()
        while data := control.recv(65536):
            for frame in decoder.feed(data):
                self._handle(control, frame)
        self.close()

    def close(self) -> None:
        """End the interpreter."""
        self._interpreter.kill()

    def _handle(self, control: socket.socket, frame: Frame) -> None:
        header = frame.header
        match header["op"]:
            case "reseed":
                self._reseed()
                control.sendall(encode({"event": "reseeded"}))
            case "environment":
                apply(os.environ, header["changes"])
                for name, value in header["changes"].items():
                    self._order(*(("unset", name) if value is None else ("set", name, value)))
            case "resize":  # a reseed follows, which may start another interpreter
                set_soft_limits(dict(header["limits"]))
                with suppress(OSError):  # it has ended, which the next order tells
                    set_soft_limits(dict(header["limits"]), self._interpreter.pid)
            case "run":
                control.sendall(self._answer(frame))

    def _answer(self, frame: Frame) -> bytes:
        header = frame.header
        number = header["run"]
        self._used |= number > 0
        try:
            code, options = split_code(frame.body, header.get("code_bytes"))
        except ProtocolError as error:  # nested too deeply for this Python
            ended, trace = _error("CannotRun", str(error)), ""
        else:
            if failed := self.get_ready():
                ended, trace = failed
            elif "stdin" in header:  # the interpreter has had its standard input since it started
                ended, trace = _error("CannotRun", ALL_AT_ONCE), ""
            else:
                self._left = header["max_display_bytes"]
                ended, trace = self.run(number, code, options.get("stdin"))
        return encode({**ended, "event": "done", "run": number, "figures": self._figures}, trace.encode())

    def run(self, number: int, code: str, stdin: str | None) -> Result:
        """Run code; returns its result and the traceback."""
        self._begin_round()
        os.ftruncate(self._stdin, 0)
        os.pwrite(self._stdin, (stdin or "").encode("utf-8", "replace"), 0)
        os.lseek(self._stdin, 0, os.SEEK_SET)  # the interpreter shares the position
        self._order("run", str(number), code, str(self._round))
        while True:
            event = self._next()
            match event.word:
                case "show":
                    self._show(number, event.parts)
                case "done":
                    return {"status": "ok"}, ""
                case "exited":
                    return {"status": "exited", "exit_code": int(event.text(0, 10) or 0) & 0xFF}, ""
                case "error":
                    return _error(event.text(0, MAX_NAME), event.text(1, MAX_MESSAGE)), event.text(2, MAX_TRACE)

    def _note_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupted = True

    def _begin_round(self) -> None:
        """Separate the interrupts of earlier runs from those of the next one."""
        if self._interrupted:
            self._interrupted = False
            self._round += 1
            with suppress(BlockingIOError):  # full, because this interpreter does not read it
                os.write(self._wakeup, NEW_ROUND)

    def _reseed(self) -> None:
        """Make a clone unique. If nothing has run yet, a new interpreter differs in everything, and starts at once."""
        if self._restarts and not self._used:
            self._interpreter.kill()
            self._interpreter = self._start()
        else:
            self._order("seed", os.urandom(SEED_BYTES).hex())

    def _order(self, word: str, *parts: str) -> None:
        try:
            self._interpreter.order(word, *parts)
        except OSError:
            self._die()

    def _next(self) -> Event:
        try:
            return self._interpreter.event()
        except (EOFError, ValueError):  # it has ended, or its code has written to our pipe
            self._die()

    def _die(self) -> NoReturn:
        """End as the interpreter has ended: the agent starts another kernel."""
        status = self._interpreter.end()
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(status))

    # ------------------------------------------------------------ values

    def _show(self, run: int, parts: list[bytes]) -> None:
        if self._control is None or not self._warm:
            return
        files, forms, dropped = [], {}, False
        for mime, data in zip(parts[::2], parts[1::2], strict=False):
            name = mime.decode("ascii", "replace")
            if name in FILE_TYPES:
                try:
                    files.append(self._save(data, FILE_TYPES[name]))
                except OSError as error:
                    dropped = True
                    _warn(f"a picture could not be saved in {OUTPUTS}: {error.strerror}")
            else:
                forms[name] = data.decode("utf-8", "replace")[:MAX_TEXT]
        body = encode_json(forms)
        dropped |= bool(forms) and len(body) > min(MAX_BODY, self._left)
        self._left -= 0 if dropped else len(body)
        header = {"event": "display", "run": run, "files": files, "dropped": dropped, "wait": True}
        self._control.sendall(encode(header, b"{}" if dropped else body))
        self._control.recv(ACK_BYTES)  # the agent has read all output so far

    def _save(self, data: bytes, extension: str) -> str:
        """Write a file under the next free number; returns its path. Raises OSError."""
        os.makedirs(OUTPUTS, exist_ok=True)
        if not self._figures:
            numbers = [int(found[1]) for name in os.listdir(OUTPUTS) if (found := FIGURE_NAME.match(name))]
            self._figures = max(numbers, default=0)
        while True:
            self._figures += 1
            path = f"{OUTPUTS}/figure-{self._figures}.{extension}"
            try:
                with open(path, "xb") as file:
                    file.write(data)
            except FileExistsError:
                continue
            except OSError:
                with suppress(OSError):
                    os.remove(path)  # it is not complete
                raise
            return path


class Service:
    """A hosted language as the zygote uses it."""

    def __init__(self, command: Command, *, restarts: bool = False) -> None:
        """`command` returns the command for a memory limit in MB, or 0. `restarts`: generators cannot be reseeded."""
        self._command = command
        self._restarts = restarts
        self._warm_up = ""

    def prepare(self) -> None:
        """Set up the environment. Without the interpreter the template's build fails."""
        os.environ.pop("PYTHONPATH", None)
        os.chdir(WORKSPACE)
        program = self._command(0)[0]
        if shutil.which(program) is None:
            raise SystemExit(f"there is no {program} in this machine: add its package to the template")

    def warm(self, code: str) -> None:
        """Keep warm-up code: every interpreter runs it first. One tries it now."""
        self._warm_up = code
        if code.strip():
            kernel = self._kernel()
            if failed := kernel.get_ready():
                raise RuntimeError("{}\n{}".format(*failed))
            kernel.close()

    def serve(self, control_fd: int, figures: int) -> None:
        """Run code as the kernel of this process."""
        self._kernel().serve(socket.socket(fileno=control_fd), figures)

    def _kernel(self) -> Kernel:
        return Kernel(self._command, self._warm_up, restarts=self._restarts)


def _moved(fd: int) -> int:
    """Move a descriptor out of the way of those that an interpreter gets."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_FD)
    os.close(fd)
    return moved


def _error(name: str, message: str) -> dict[str, Any]:
    return {"status": "error", "name": name, "message": message}


def _warn(line: str) -> None:
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())
