"""Many requests at once on one byte stream to an agent: ids out, answers matched, hostile bytes kept out."""

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import anyio
from anyio.abc import ByteStream

from guest.client.pacing import Pace
from guest.client.parsing import is_ok, parse_refusal
from guest.client.streams import Streams
from guest.errors import AgentGone, AgentTimeout, GuestError, ProtocolError, RequestRefused
from guest.protocol import Decoder, Frame, encode

READ_BYTES = 256 * 1024
MAX_OPEN_REQUESTS = 64
STOPPING = ("stop", "terminal_close")  # requests that are sent however many are open: they end others
MAX_STALE_FRAMES = 64  # of an earlier conversation, before the answer to the greeting


class Receiver(Protocol):
    """Takes the frames that answer one request."""

    def take(self, frame: Frame) -> bool:
        """Take a frame; True if it was the last. Raises ProtocolError if it is not allowed."""

    def fail(self, error: GuestError) -> None:
        """End the request: no more frames will come."""


class _Answer:
    """Waits for the one frame that answers a request."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.failure: GuestError | None = None
        self.done = anyio.Event()

    def take(self, frame: Frame) -> bool:
        if is_ok(frame):
            self.frame = frame
        else:
            self.failure = parse_refusal(frame.header)
        self.done.set()
        return True

    def fail(self, error: GuestError) -> None:
        self.failure = error
        self.done.set()


class Channel:
    """The requests on one stream. After a failure every further request fails the same way.

    With `seeking`, what an earlier conversation left in the stream is skipped.
    """

    def __init__(self, stream: ByteStream, timeout_s: float, *, seeking: bool = False) -> None:
        self.timeout_s = timeout_s
        self.failure: GuestError | None = None
        self._stream = stream
        self._open: dict[int, Receiver] = {}
        self._first_id = self.last_id = secrets.randbits(32)  # not the ids of an earlier conversation
        self._abandoned: set[int] = set()  # sent and given up, not answered yet
        self._stale_left = MAX_STALE_FRAMES if seeking else 0
        self._failed = anyio.Event()
        self.streams = Streams(self.send_frame)
        self._sending = anyio.Lock(fast_acquire=True)
        self._decoder = Decoder(seeking=seeking)
        self._pace = Pace()
        self._reading = anyio.CancelScope()
        self._stopped_reading = anyio.Event()

    def resume(self, last_id: int, unread: bytes) -> None:
        """Continue where another channel on this stream stopped, before anything is read."""
        self._first_id = self.last_id = last_id
        for frame in self._decoder.feed(unread):
            self._dispatch(frame)

    async def wait_failed(self) -> None:
        """Return when nothing can be asked any more: `failure` says why."""
        await self._failed.wait()

    async def ask(
        self, op: str, args: Mapping[str, Any], body: bytes = b"", *, timeout_s: float | None = None
    ) -> Frame:
        """Send a request and return its answer.

        Raises:
            RequestRefused: the agent says no.
            AgentTimeout: there is no answer within `timeout_s`.
            GuestError: the channel has failed.
        """
        answer = _Answer()
        number = self.register(answer, always=op in STOPPING)
        sent = False
        try:
            with anyio.move_on_after(self.timeout_s if timeout_s is None else timeout_s):
                await self.send(number, op, args, body)
                sent = True
                await answer.done.wait()
        finally:
            if self.forget(number) and sent:
                self._abandoned.add(number)
        if answer.failure is not None:
            raise answer.failure
        if answer.frame is None:
            raise AgentTimeout(f"the agent did not answer {op!r} in time")
        return answer.frame

    def register(self, receiver: Receiver, *, always: bool = False) -> int:
        """Reserve an id for a request whose answers go to `receiver`, `always` even if too many are open."""
        if self.failure is not None:
            raise self.failure
        if len(self._open) + len(self._abandoned) >= MAX_OPEN_REQUESTS and not always:
            raise RequestRefused("busy", f"{MAX_OPEN_REQUESTS} requests are open on this machine already")
        self.last_id += 1
        self._open[self.last_id] = receiver
        return self.last_id

    def is_open(self, number: int) -> bool:
        """Whether answers to a request are still expected."""
        return number in self._open

    def forget(self, number: int) -> bool:
        """Expect no more answers to a request; returns whether any were still expected."""
        return self._open.pop(number, None) is not None

    async def send(self, number: int, op: str, args: Mapping[str, Any], body: bytes) -> None:
        """Send a request."""
        await self.send_frame({"id": number, "op": op, **args}, body)

    async def send_frame(self, header: dict[str, Any], body: bytes) -> None:
        """Send one frame. Half a frame would break the stream: once begun, sending is not cancelled."""
        data = encode(header, body)
        async with self._sending:
            if self.failure is not None:
                raise self.failure
            try:
                with anyio.CancelScope(deadline=anyio.current_time() + self.timeout_s, shield=True) as scope:
                    await self._stream.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
                raise self.fail(AgentGone("the stream to the agent is closed")) from error
            if scope.cancelled_caught:
                raise self.fail(AgentTimeout("the agent does not read what it is sent"))

    def fail(self, error: GuestError) -> GuestError:
        """Fail all open requests and every later one; only the first failure counts."""
        if self.failure is None:
            self.failure = error
            self._failed.set()
        for receiver in self._open.values():
            receiver.fail(self.failure)
        self._open.clear()
        self.streams.fail()
        return error

    async def read(self) -> None:
        """Read until the stream ends, the agent breaks the protocol or the channel is released."""
        try:
            with self._reading:
                while True:
                    await self._handle(await self._stream.receive(READ_BYTES))
        except ProtocolError as error:
            self.fail(error)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self.fail(AgentGone("the machine's agent closed the stream"))
        except anyio.get_cancelled_exc_class():
            self.fail(AgentGone("the client no longer reads from the machine's agent"))  # or requests would hang
            raise
        except Exception as error:  # our own bug, which the agent has found: fail the open requests
            fault = ProtocolError(f"what the agent sent could not be handled: {error!r}")
            fault.__cause__ = error
            self.fail(fault)
        finally:
            self._stopped_reading.set()

    async def release(self) -> bytes:
        """Stop using the stream; returns what was received and is not a whole frame yet.

        Raises:
            RequestRefused: a request has not been answered yet.
            GuestError: the channel has failed.
        """
        if self.failure is not None:
            raise self.failure
        if self._open or self._abandoned:
            raise RequestRefused("busy", "the agent has not answered all requests yet, so it cannot be handed over")
        self.fail(AgentGone("the agent was handed over to another client"))
        self._reading.cancel()
        with anyio.CancelScope(shield=True):
            await self._stopped_reading.wait()
        return self._decoder.incomplete

    async def _handle(self, data: bytes) -> None:
        """Handle what was received, in turns. Meanwhile nothing more is read, so the agent has to wait."""
        pace = self._pace
        pace.begin_turn()
        frames = self._decoder.feed(data, most=1)
        while frames:
            self._dispatch(frames[0])
            if pace.turn_is_over():
                await pace.next_turn()
            frames = self._decoder.feed(b"", most=1)
        await pace.end_turn()

    def _dispatch(self, frame: Frame) -> None:
        if "do" in frame.header:
            self.streams.take(frame)
            return
        number = frame.header.get("id")
        if type(number) is not int or not self._first_id < number <= self.last_id:
            if self._stale_left:
                self._stale_left -= 1
                return
            raise ProtocolError(f"the agent answers a request that was never made: {str(number)[:60]!r}")
        self._stale_left = 0
        receiver = self._open.get(number)
        if receiver is not None:
            if receiver.take(frame):
                del self._open[number]
        elif number in self._abandoned and "ok" in frame.header:
            self._abandoned.remove(number)
        else:
            raise ProtocolError("the agent goes on answering a request that has ended")
