"""The host's side of the wire: what it can ask of one machine's agent."""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio
from anyio.abc import ByteStream, TaskGroup

from guest.client import parsing
from guest.client.channel import Channel
from guest.client.messages import (
    AgentState,
    FileChunk,
    FileInfo,
    Hello,
    Identity,
    Listing,
    Refreshed,
    RunCode,
    WarmUp,
)
from guest.client.runs import Run
from guest.client.streams import ServeStream
from guest.client.terminals import Size, Terminal
from guest.client.uploads import MAX_UPLOADS, Upload
from guest.errors import AgentGone, AgentTimeout, GuestError, ProtocolError, RequestRefused, first_error
from guest.protocol import MAX_BODY, PROTOCOL_VERSION, Frame, encode_json

KILL_MARGIN_S = 3.0  # after the grace period: a kill and a last frame, on a slow emulated CPU
HANG_UP_S = 2.0  # for the programs of a terminal, which the agent gives less
MIN_ENTROPY_BYTES = 32

T = TypeVar("T")


class Detached(NamedTuple):
    """A greeted agent without a client: `AgentClient.adopt` takes both."""

    stream: ByteStream
    state: AgentState


class AgentClient:
    """Speaks to one agent. Get one from `AgentClient.open` or `AgentClient.adopt`.

    Any number of tasks may use it at once. A cancelled request leaves the client usable. After a ProtocolError, after
    AgentGone, or when a run could not be stopped, every further request fails the same way.
    """

    hello: Hello
    refreshed: Refreshed | None = None  # the outcome of the last refresh

    def __init__(self, stream: ByteStream, timeout_s: float, *, seeking: bool = False) -> None:
        self._stream = stream
        self._channel = Channel(stream, timeout_s, seeking=seeking)
        self._detached = False
        self._tasks: TaskGroup
        self._uploads = anyio.Semaphore(MAX_UPLOADS)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        stream: ByteStream,
        *,
        timeout_s: float,
        identity: Identity | None = None,
        seeking: bool = False,
        serve_stream: ServeStream | None = None,
    ) -> AsyncIterator["AgentClient"]:
        """Greet the agent and serve requests until the block ends; then the stream is closed.

        With an `identity` the machine is refreshed at the same time: every restored machine must be opened so.
        `timeout_s` bounds the greeting and every later request that is not a run. `seeking` skips what an earlier
        conversation left in the stream, which only a serial port can have: it knows no connections. The machine may
        open streams if there is a function that serves them.
        """
        client = cls(stream, timeout_s, seeking=seeking)
        async with client._serving(serve_stream):
            async with anyio.create_task_group() as greeting:  # both requests travel at once
                greeting.start_soon(client._greet)
                if identity is not None:
                    greeting.start_soon(client.refresh, identity)
            yield client

    @classmethod
    @asynccontextmanager
    async def adopt(
        cls, stream: ByteStream, state: AgentState, *, timeout_s: float, serve_stream: ServeStream | None = None
    ) -> AsyncIterator["AgentClient"]:
        """Take over an agent that another client has greeted and detached: `open` without the greeting."""
        client = cls(stream, timeout_s)
        client.hello, client.refreshed = state.hello, state.refreshed
        async with client._serving(serve_stream, resume=state):
            yield client

    async def detach(self) -> Detached:
        """Give the agent up: its stream stays open when the block ends, and another client can `adopt` it.

        What the agent sends until then waits in the stream. Every further request of this client fails.

        Raises:
            RequestRefused: a request or a run has not ended yet. The client goes on.
            GuestError: the agent cannot be asked any more.
        """
        last_id = self._channel.last_id
        unread = await self._channel.release()
        self._detached = True
        return Detached(
            self._stream, AgentState(hello=self.hello, refreshed=self.refreshed, last_id=last_id, unread=unread)
        )

    @property
    def timeout_s(self) -> float:
        """What bounds a request that is not a run."""
        return self._channel.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._channel.timeout_s = seconds

    @property
    def failure(self) -> GuestError | None:
        """Why every further request fails; None while the agent can be asked."""
        return self._channel.failure

    async def wait_failed(self) -> None:
        """Return when the agent cannot be asked any more: `failure` says why."""
        await self._channel.wait_failed()

    async def refresh(self, identity: Identity) -> Refreshed:
        """Make a restored machine unique: entropy, clock, hostname, machine id, the kernel's generators."""
        if len(identity.entropy) < MIN_ENTROPY_BYTES:
            raise ValueError(f"a refresh needs at least {MIN_ENTROPY_BYTES} bytes of entropy")
        sent = time.time_ns()
        args = {
            "hostname": identity.hostname,
            "machine_id": identity.machine_id,
            "time_ns": sent,
            "reseed": identity.reseed,
            "reseed_all": identity.reseed_all,
            "network": identity.network,
            "device": asdict(identity.device) if identity.device else None,
            "size": asdict(identity.size) if identity.size else None,
        }
        self.refreshed = await self._ask(
            "refresh",
            args,
            identity.entropy,
            parse=lambda frame: parsing.parse_refreshed(frame.header, (sent + time.time_ns()) // 2),
        )
        return self.refreshed

    async def warm(self, warm_up: WarmUp, timeout_s: float) -> None:
        """Prepare a machine for its first caller and start the first kernel. Only before a snapshot.

        A service gets its own time to become ready, in addition to `timeout_s`.
        """
        args, code = parsing.warm_args(warm_up), _encoded(warm_up.code)
        timeout_s += warm_up.service.ready_timeout_s if warm_up.service else 0
        await self._ask("warm", args, code, parse=_nothing, timeout_s=timeout_s)

    async def rehearse(self, timeout_s: float) -> None:
        """Let a restored machine touch the pages that its first caller needs. Only before a refresh.

        Raises:
            RequestRefused: the template's code failed. The machine can be used.
        """
        await self._ask("rehearse", {}, parse=_nothing, timeout_s=timeout_s)

    async def settle(self, timeout_s: float) -> None:
        """Wait for what a refresh has started. Only for a machine that then stands still without an owner.

        Raises:
            RequestRefused: the template's code failed. The machine can be used.
        """
        await self._ask("settle", {}, parse=_nothing, timeout_s=timeout_s)

    @asynccontextmanager
    async def run(self, request: RunCode) -> AsyncIterator[Run]:
        """Run code. Leaving the block before the run has finished stops it."""
        code, args = _encoded(request.code), parsing.run_args(request)
        if request.kind != "code" or request.options is not None or request.stdin_open:
            args.update(kind=request.kind, code_bytes=len(code))
            code = _small(code + encode_json(dict(request.options or {})))

        async def stop() -> None:
            await self._ask("stop", {"run": number}, parse=_nothing)

        async def write(data: bytes, end: bool) -> None:
            await self._ask("stdin", {"run": number, "end": end}, data, parse=_nothing)

        run = Run(request, stop, write)
        number = self._channel.register(run)
        try:
            await self._channel.send(number, "run", args, code)
        except BaseException:  # never sent: there is nothing to stop
            self._channel.forget(number)
            raise
        try:
            yield run
        finally:
            if self._channel.is_open(number):
                await self._end(run, number, run.request.grace_s)

    @asynccontextmanager
    async def terminal(self, size: Size, term: str) -> AsyncIterator[Terminal]:
        """Open a terminal with a shell. Leaving the block before the shell has ended hangs up."""

        async def ask(op: str, args: dict[str, Any], body: bytes = b"") -> None:
            await self._ask(op, {"terminal": number, **args}, body, parse=_nothing)

        terminal = Terminal(ask)
        number = self._channel.register(terminal)
        try:
            await self._channel.send(number, "terminal", {**size._asdict(), "term": term}, b"")
        except BaseException:  # never sent: there is nothing to close
            self._channel.forget(number)
            raise
        try:
            await terminal.opened(self.timeout_s)
            yield terminal
        finally:
            if self._channel.is_open(number):
                await self._end(terminal, number, HANG_UP_S)

    @asynccontextmanager
    async def connect(self, port: int) -> AsyncIterator[ByteStream]:
        """Connect to a port on the machine's loopback, in every network mode. Raises RequestRefused."""
        try:
            stream = await self._channel.streams.connect(port, self.timeout_s)
        except anyio.BrokenResourceError:
            raise self.failure or AgentGone("the stream to the agent is closed") from None
        try:
            yield stream
        finally:
            with anyio.CancelScope(shield=True), suppress(GuestError):
                await stream.aclose()
                await self.ping()  # after all frames of the stream: now the machine may be frozen

    async def read(self, path: str, *, offset: int = 0, limit: int) -> FileChunk:
        """Read up to `limit` bytes of a regular file."""
        parts: list[bytes] = []
        while True:
            want = min(limit, MAX_BODY)
            args = {"path": path, "offset": offset, "limit": want}
            chunk = await self._ask("read", args, parse=partial(parsing.parse_chunk, limit=want))
            parts.append(chunk.data)
            offset += len(chunk.data)
            limit -= len(chunk.data)
            if chunk.eof or limit <= 0:
                return FileChunk(b"".join(parts), chunk.size, chunk.eof)

    async def write(self, path: str, data: bytes, *, append: bool = False) -> FileInfo:
        """Create or replace a file in one step, with its parent directories. A file that is replaced keeps its mode.

        With `append`, the data is added to the file that is there: all of it or nothing.
        """
        async with self.upload(path, append=append) as upload:
            sent = 0
            while len(data) - sent > MAX_BODY:
                await upload.add(data[sent : sent + MAX_BODY])
                sent += MAX_BODY
            return await upload.finish(data[sent:])

    @asynccontextmanager
    async def upload(self, path: str, *, append: bool = False) -> AsyncIterator[Upload]:
        """Write a file as `write` does, part by part. Leaving the block before `finish` discards what was sent."""
        upload = Upload(path, self._ask, self._uploads, append=append)
        try:
            yield upload
        finally:
            await upload.leave()

    async def make_folder(self, path: str) -> None:
        """Create a directory with its parents, unless it exists."""
        await self._ask("make_folder", {"path": path}, parse=_nothing)

    async def list(self, path: str, *, recursive: bool, max_entries: int, skip: int = 0) -> Listing:
        """List the entries of a directory after the first `skip` of them, without following links."""
        args = {"path": path, "recursive": recursive, "max_entries": max_entries, "skip": skip}
        return await self._ask("list", args, parse=lambda frame: parsing.parse_listing(frame, max_entries))

    def allow_streams(self, serve: ServeStream) -> None:
        """Let the machine open streams from now on, and serve them. It does so once it is refreshed with a network."""
        self._channel.streams.allow(self._tasks, serve)

    async def close_streams(self) -> int:
        """End all streams; returns how many there were. The machine opens none until it is refreshed.

        A machine must have none when it is frozen.
        """
        closed = await self._channel.streams.close()
        await self._ask("close_streams", {}, parse=_nothing)
        return closed + await self._channel.streams.close()  # opened while the request was on its way

    async def ping(self) -> None:
        """Return when the agent has answered, which it does after all earlier file requests."""
        await self._ask("ping", {}, parse=_nothing)

    async def at_rest(self) -> bool:
        """Return whether nothing runs in the machine that would notice if it stood still."""
        return await self._ask("at_rest", {}, parse=lambda frame: frame.header.get("at_rest") is True)

    # ---------------------------------------------------------------- helpers

    @asynccontextmanager
    async def _serving(self, serve: ServeStream | None, resume: AgentState | None = None) -> AsyncIterator[None]:
        """Read from the agent until the block ends; then close the stream, unless the client was detached."""
        channel = self._channel
        try:
            if resume is not None:
                parsing.require_version(resume.hello.version)
                channel.resume(resume.last_id, resume.unread)
            async with anyio.create_task_group() as self._tasks:
                if serve is not None:
                    self.allow_streams(serve)
                self._tasks.start_soon(channel.read)
                try:
                    yield
                finally:
                    channel.fail(AgentGone("the client was closed"))
                    self._tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # the reader never raises: this is the block's own exception
            error = first_error(group)
            raise error from error.__cause__
        finally:
            if not self._detached:
                await self._stream.aclose()

    async def _greet(self) -> None:
        nonce = secrets.token_hex(8)
        args = {"version": PROTOCOL_VERSION, "nonce": nonce}
        self.hello = await self._ask("hello", args, parse=lambda f: parsing.parse_hello(f.header, nonce))

    async def _ask(
        self,
        op: str,
        args: dict[str, Any],
        body: bytes = b"",
        *,
        parse: Callable[[Frame], T],
        timeout_s: float | None = None,
    ) -> T:
        """Send a request and return its parsed answer. An answer that cannot be parsed fails the client."""
        frame = await self._channel.ask(op, args, body, timeout_s=timeout_s)
        try:
            return parse(frame)
        except ProtocolError as error:
            self._channel.fail(error)
            raise

    async def _end(self, run: Run | Terminal, number: int, grace_s: float) -> None:
        """Stop a run or terminal that its caller has left. One that cannot be stopped fails the client."""
        limit = grace_s + KILL_MARGIN_S
        try:
            with anyio.move_on_after(limit, shield=True):
                await run.stop()
                await run.wait_finished()
                return
            self._channel.fail(AgentTimeout(f"a run could not be stopped within {limit} s"))
        except GuestError:
            pass  # recorded where it happened; what ends the block matters more
        finally:
            self._channel.forget(number)


def _nothing(_frame: Frame) -> None:
    """Parse an answer that carries nothing."""


def _encoded(code: str) -> bytes:
    return _small(code.encode("utf-8", "replace"))


def _small(data: bytes) -> bytes:
    if len(data) > MAX_BODY:
        raise RequestRefused(
            "too_large", f"code and data have {len(data):,} bytes; at most {MAX_BODY:,} fit: write them to a file"
        )
    return data
