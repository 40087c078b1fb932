"""One terminal as the host sees it: bytes both ways, its size, and how its shell ended."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import anyio
from pydantic import TypeAdapter

from guest.client import parsing
from guest.client.wire import ExitCode, SignalName, check
from guest.errors import AgentTimeout, GuestError, ProtocolError
from guest.protocol import Frame
from guest.terminals import CHUNK, INPUT_WINDOW, OUTPUT_WINDOW

STUCK_S = 10.0  # for a program to read what was typed; then it is lost, as with any terminal

Ask = Callable[..., Awaitable[None]]  # a request about this terminal


class Size(NamedTuple):
    """The size of a terminal in characters."""

    columns: int
    rows: int


@dataclass(frozen=True, slots=True)
class ShellEnd:
    """How the shell of a terminal ended: one of both is given."""

    exit_code: ExitCode | None
    signal: SignalName | None


_SHELL_END = TypeAdapter(ShellEnd)


class Terminal:
    """A terminal in a machine. Get one from `AgentClient.terminal`. One task may receive, and one may send."""

    def __init__(self, ask: Ask) -> None:
        self.end: ShellEnd | None = None
        self._ask = ask
        self._received = bytearray()
        self._used = 0  # bytes since the last window
        self._credit = 0  # bytes that the machine takes
        self._stuck = False  # no program reads what is typed
        self._is_open = False
        self._failure: GuestError | None = None
        self._changed = anyio.Event()

    async def opened(self, timeout_s: float) -> None:
        """Return when there is a shell. Raises RequestRefused, or AgentTimeout."""
        try:
            with anyio.fail_after(timeout_s):
                while not self._is_open:
                    await self._change()
        except TimeoutError:
            raise AgentTimeout("the agent did not open a terminal in time") from None

    async def receive(self) -> bytes:
        """Return what programs wrote; nothing when the shell has ended, and then `end` says how."""
        while not self._received:
            if self.end is not None:
                return b""
            await self._change()
        data = bytes(self._received[:CHUNK])
        del self._received[:CHUNK]
        self._used += len(data)
        if self._used >= OUTPUT_WINDOW // 2 and self.end is None:
            used, self._used = self._used, 0
            await self._ask("terminal_window", {"bytes": used})
        return data

    async def send(self, data: bytes) -> None:
        """Type. What no program reads for a long time is lost."""
        while data and self.end is None:
            with anyio.move_on_after(0 if self._stuck else STUCK_S):
                while not self._credit and self.end is None:
                    await self._change()
            size = min(len(data), self._credit, CHUNK)
            self._stuck = not size  # more is dropped at once, so that a client that leaves is noticed
            if not size:
                return
            self._credit -= size
            await self._ask("terminal_input", {}, data[:size])
            data = data[size:]

    async def resize(self, size: Size) -> None:
        """Change the size."""
        await self._ask("terminal_resize", size._asdict())

    async def stop(self) -> None:
        """Hang up."""
        await self._ask("terminal_close", {})

    async def wait_finished(self) -> None:
        """Discard output until the shell has ended."""
        while self.end is None:
            if not await self.receive():
                return

    def take(self, frame: Frame) -> bool:
        """Take a frame; True if it was the last. Raises ProtocolError if it is not allowed."""
        header, body = frame
        if "ok" in header:
            if parsing.is_ok(frame):
                self.end = check(_SHELL_END, {"exit_code": None, "signal": None, **header}, "end of a terminal")
                self._wake()
            else:
                self.fail(parsing.parse_refusal(header))
            return True
        match header.get("event"):
            case "output":
                self._received += body
                if not body or len(self._received) + self._used > OUTPUT_WINDOW:
                    raise ProtocolError("the agent sends more than a terminal's window, or nothing")
            case "window":
                self._open_window(header.get("bytes"))
            case kind:
                raise ProtocolError(f"the agent sent an unknown event: {str(kind)[:60]!r}")
        self._wake()
        return False

    def fail(self, error: GuestError) -> None:
        """End the terminal: no more frames will come."""
        self._failure = error
        self._wake()

    def _open_window(self, size: object) -> None:
        if type(size) is not int or not 0 < size <= INPUT_WINDOW - self._credit:
            raise ProtocolError("the agent opens a terminal's window by nonsense")
        self._is_open = True
        self._credit += size

    async def _change(self) -> None:
        """Wait until something happens. Raises what ended the terminal."""
        if self._failure is not None:
            raise self._failure
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
