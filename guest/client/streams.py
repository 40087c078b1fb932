"""The host's end of streams: byte streams that a machine opens, or the host does, and limits on the machine."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.abc import ByteStream, TaskGroup

from guest.errors import GuestError, ProtocolError, RequestRefused
from guest.protocol import Frame
from guest.streams import CHUNK, GUEST_WINDOW, MAX_HOST_STREAMS, MAX_STREAMS, WINDOW, OpenRate, guest_window

log = logging.getLogger(__name__)

MAX_NUMBER = 2**53  # of a stream: JSON of any language can carry it, and no machine lives so long
TOLERANCE = 2  # a machine's clock may run faster than ours
MAX_WINDOW = 5 * WINDOW  # bytes: beyond it one stream does not become faster
SPARE = 3 * 1024 * 1024  # bytes that the windows of all streams of a machine may grow by, together
Resize = Callable[[int], int]  # by how much a window of this size shall change
SendFrame = Callable[[dict[str, Any], bytes], Awaitable[None]]
ServeStream = Callable[[ByteStream], Awaitable[None]]


class GuestStream(ByteStream):
    """One stream of a machine. Only one task may receive, and only one may send."""

    def __init__(
        self,
        number: int,
        send: SendFrame,
        closed: Callable[[int], None],
        resize: Resize,
        most_sent: Callable[[], int] = lambda: GUEST_WINDOW,
    ) -> None:
        """`most_sent` says how many bytes may be on the way to the machine."""
        self._number = number
        self._send_frame = send
        self._closed = closed
        self._resize = resize
        self._most_sent = most_sent
        self.window = WINDOW  # bytes that the machine may send before they are used
        self._received = bytearray()
        self._used = 0  # bytes since the last window frame
        self._credit = GUEST_WINDOW  # bytes that the machine takes
        self._connected = True  # or it waits for the machine to connect it
        self._in_ended = self._out_ended = self._broken = self._over = False
        self._changed = anyio.Event()

    async def connect(self, port: int) -> bool:
        """Connect to a port of the machine; returns whether anything listens there."""
        self._connected = False
        await self._frame("open", port=port)
        while not self._connected and not self._broken:
            await self._changed.wait()
        return not self._broken

    async def receive(self, max_bytes: int = CHUNK) -> bytes:
        """Return what has arrived. Raises EndOfStream when the machine has ended its direction."""
        while not self._received:
            if self._broken:
                raise anyio.BrokenResourceError
            if self._in_ended:
                raise anyio.EndOfStream
            await self._changed.wait()
        data = bytes(self._received[:max_bytes])
        del self._received[:max_bytes]
        self._used += len(data)
        if self._used >= self.window // 2 and not self._in_ended:
            used, self._used = self._used, 0
            more = max(self._resize(self.window), -used)
            self.window += more
            if used + more:
                await self._frame("window", bytes=used + more)
        return data

    async def send(self, item: bytes) -> None:
        """Send bytes as the machine takes them."""
        view = memoryview(item)
        while view:
            self._check_sending()
            room = self._credit - GUEST_WINDOW + self._most_sent()
            if room <= 0:
                await self._changed.wait()
                continue
            size = min(len(view), room, CHUNK)
            self._credit -= size
            await self._frame("data", bytes(view[:size]))
            view = view[size:]

    async def send_eof(self) -> None:
        """End this direction."""
        if not self._out_ended:
            self._check_sending()
            self._out_ended = True
            await self._frame("end")
            self._finish()

    async def aclose(self) -> None:
        """Give the stream up, unless both directions have ended."""
        if not self._over:
            self._broken = True
            with anyio.CancelScope(shield=True):
                try:
                    await self._frame("reset")
                except anyio.BrokenResourceError:
                    pass
                finally:
                    self._end()

    # ---------------------------------------------------------------- from the machine

    def take(self, what: object, frame: Frame) -> None:
        """Take a frame. Raises ProtocolError."""
        if not self._connected and what != "reset":
            if what != "opened":
                raise ProtocolError("the agent uses a stream before it has connected it")
            self._connected = True
        elif what == "data" and not self._in_ended:
            self._received += frame.body
            if len(self._received) + self._used > self.window:
                raise ProtocolError("the agent sends more than a stream's window")
        elif what == "window":
            self._credit += _positive(frame.header.get("bytes"))
            if self._credit > GUEST_WINDOW:
                raise ProtocolError("the agent opens a stream's window too far")
        elif what == "end" and not self._in_ended:
            self._in_ended = True
            self._finish()
        elif what == "reset":
            self.fail()
        else:
            raise ProtocolError(f"the agent sends {str(what)[:40]!r} on a stream")
        self.wake()

    def fail(self) -> None:
        """End both directions: the machine has given the stream up, or is gone."""
        self._broken = True
        self._end()

    def _check_sending(self) -> None:
        if self._broken:
            raise anyio.BrokenResourceError
        if self._out_ended:
            raise anyio.ClosedResourceError

    async def _frame(self, what: str, body: bytes = b"", **fields: int) -> None:
        """Send a frame. Raises BrokenResourceError, as byte streams do, if the machine is gone."""
        try:
            await self._send_frame({"stream": self._number, "do": what, **fields}, body)
        except GuestError as error:
            raise anyio.BrokenResourceError from error

    def _finish(self) -> None:
        if self._in_ended and self._out_ended:
            self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._closed(self._number)
            self.wake()

    def wake(self) -> None:
        """Let the tasks that wait look again at what they wait for."""
        self._changed.set()
        self._changed = anyio.Event()


class Streams:
    """All streams of one machine. Without a task group, the machine may open none, but the host may."""

    def __init__(self, send: SendFrame) -> None:
        self._send = send
        self._open: dict[int, GuestStream] = {}
        self._last = 0  # number that the machine gave a stream
        self._own_last = 0  # that the host did: they are negative
        self._rate = OpenRate(time.monotonic(), TOLERANCE)
        self._serve: ServeStream | None = None
        self._tasks: TaskGroup | None = None

    def allow(self, tasks: TaskGroup, serve: ServeStream) -> None:
        """Serve every stream that the machine opens with a task of its own."""
        self._tasks, self._serve = tasks, serve

    def take(self, frame: Frame) -> None:
        """Take a frame of a stream. Raises ProtocolError if an honest agent would not send it."""
        number, what = frame.header.get("stream"), frame.header.get("do")
        own = type(number) is int and self._own_last <= number < 0
        if not own and (self._serve is None or self._tasks is None):
            raise ProtocolError("the agent opens a stream, but this machine may not")
        if type(number) is not int or number > MAX_NUMBER:
            raise ProtocolError("the number of a stream is not a number of streams")
        if what == "open" and self._serve is not None and self._tasks is not None:
            self._begin(number, self._tasks, self._serve)
        elif stream := self._open.get(number):
            stream.take(what, frame)
        elif not own and not 0 < number <= self._last:
            raise ProtocolError(f"the agent uses stream {str(number)[:40]}, which it has not opened")
        # else: the stream was given up here while the frame was on its way

    async def connect(self, port: int, timeout_s: float) -> GuestStream:
        """Open a stream to a port on the machine's loopback.

        Raises:
            RequestRefused: nothing listens there, or too many streams of the host are open.
            BrokenResourceError: the machine is gone.
        """
        if sum(number < 0 for number in self._open) >= MAX_HOST_STREAMS:
            raise RequestRefused("busy", f"{MAX_HOST_STREAMS} connections to this sandbox are open already")
        self._own_last -= 1
        number = self._own_last
        stream = self._open[number] = GuestStream(number, self._send, self._forget, self._resize, self._most_sent)
        connected = False
        try:
            with anyio.move_on_after(timeout_s):
                connected = await stream.connect(port)
        finally:
            if not connected:
                await stream.aclose()
        if not connected:
            raise RequestRefused("not_found", f"nothing listens on its port {port}")
        return stream

    def fail(self) -> None:
        """End all streams: the machine is gone."""
        for stream in list(self._open.values()):
            stream.fail()

    async def close(self) -> int:
        """Give all streams up; returns how many were open."""
        streams = list(self._open.values())
        for stream in streams:
            await stream.aclose()
        return len(streams)

    def _begin(self, number: int, tasks: TaskGroup, serve: ServeStream) -> None:
        if number <= self._last:
            raise ProtocolError("the agent opens a stream twice")
        if sum(number > 0 for number in self._open) >= MAX_STREAMS:
            raise ProtocolError(f"the agent opens more than {MAX_STREAMS} streams")
        if not self._rate.take(time.monotonic()):
            raise ProtocolError("the agent opens streams too often")
        self._last = number
        stream = self._open[number] = GuestStream(number, self._send, self._forget, self._resize, self._most_sent)
        tasks.start_soon(self._run, serve, stream)

    @staticmethod
    async def _run(serve: ServeStream, stream: GuestStream) -> None:
        try:
            await serve(stream)
        except Exception:  # it ends this stream, not the machine
            log.exception("a stream of a machine could not be served")
        finally:
            await stream.aclose()

    def _resize(self, window: int) -> int:
        """Return by how much a window shall change: each stream may have the same share of SPARE."""
        share = WINDOW + min(MAX_WINDOW - WINDOW, SPARE // max(1, len(self._open)))
        taken = sum(stream.window - WINDOW for stream in self._open.values())
        return min(share - window, SPARE - taken)

    def _most_sent(self) -> int:
        return guest_window(len(self._open))

    def _forget(self, number: int) -> None:
        """Count a stream no more: the others may have more on the way."""
        self._open.pop(number, None)
        for stream in self._open.values():
            stream.wake()


def _positive(value: object) -> int:
    if type(value) is not int or not 0 < value <= GUEST_WINDOW:
        raise ProtocolError("the agent opens a stream's window by nonsense")
    return value
