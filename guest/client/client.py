"""The host's side of the wire: many requests at once on one byte stream to one machine's agent."""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.abc import ByteStream

from guest.client import parsing
from guest.client.groups import first_error
from guest.client.messages import FileChunk, FileInfo, GuestUsage, Hello, Identity, Listing, Refreshed, RunCode, WarmUp
from guest.client.runs import Run
from guest.errors import AgentGone, AgentTimeout, GuestError, ProtocolError, RequestRefused
from guest.protocol import MAX_BODY, PROTOCOL_VERSION, Decoder, Frame, encode, encode_json

READ_BYTES = 256 * 1024
MAX_OPEN_REQUESTS = 64
KILL_MARGIN_S = 3.0  # after the grace period: a kill and a last frame, on a slow emulated CPU
MIN_ENTROPY_BYTES = 32

T = TypeVar("T")


class _Answer:
    """Waits for the one frame that answers a request."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.failure: GuestError | None = None
        self.done = anyio.Event()

    def take(self, frame: Frame) -> bool:
        if "ok" not in frame.header:
            raise ProtocolError("the agent sent an event where only an answer is due")
        if parsing.is_ok(frame):
            self.frame = frame
        else:
            self.failure = parsing.parse_refusal(frame.header)
        self.done.set()
        return True

    def fail(self, error: GuestError) -> None:
        self.failure = error
        self.done.set()


class AgentClient:
    """Speaks to one agent. Open it with `AgentClient.open(stream, timeout_s=…)`.

    Any number of tasks may use it at once. A cancelled request is forgotten and leaves the client usable.
    After a ProtocolError, after AgentGone, or when a run could not be stopped, every further request fails
    the same way.
    """

    hello: Hello
    refreshed: Refreshed | None = None  # what came of the refresh, if it was opened with an identity

    def __init__(self, stream: ByteStream, timeout_s: float) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self._open: dict[int, _Answer | Run] = {}
        self._last_id = self._first_id = secrets.randbits(32)  # not the ids of an earlier conversation
        self._forgotten: set[int] = set()  # given up, and not answered yet
        self._greeted = False
        self._broken: GuestError | None = None
        self._breaking = anyio.Event()
        self._sending = anyio.Lock(fast_acquire=True)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, stream: ByteStream, *, timeout_s: float, identity: Identity | None = None
    ) -> AsyncIterator["AgentClient"]:
        """Greet the agent and serve requests until the block ends; then the stream is closed.

        With an `identity` the machine is refreshed in the same breath, which is how every restored machine has to
        be opened. `timeout_s` bounds the greeting and every later request that is not a run.
        """
        client = cls(stream, timeout_s)
        try:
            async with stream, anyio.create_task_group() as tasks:
                tasks.start_soon(client._read)
                try:
                    async with anyio.create_task_group() as greeting:  # both requests travel at once
                        greeting.start_soon(client._greet)
                        if identity is not None:
                            greeting.start_soon(client._introduce, identity)
                    yield client
                finally:
                    client._break(AgentGone("the client was closed"))
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # the reader never raises: this is the block's own exception
            error = first_error(group)
            raise error from error.__cause__

    @property
    def failure(self) -> GuestError | None:
        """Why every further request fails; None while the agent can be asked."""
        return self._broken

    async def wait_failed(self) -> None:
        """Return when the agent cannot be asked any more: `failure` says why."""
        await self._breaking.wait()

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
        }
        return await self._ask(
            "refresh",
            args,
            identity.entropy,
            parse=lambda frame: parsing.parse_refreshed(frame.header, (sent + time.time_ns()) // 2),
        )

    async def warm(self, warm_up: WarmUp, timeout_s: float) -> None:
        """Let a machine get ready for its first caller, and start the first kernel. Only before a snapshot.

        A service has its own time to get ready, before that of all the rest.
        """
        args, code = parsing.warm_args(warm_up), _encoded(warm_up.code)
        timeout_s += warm_up.service.ready_timeout_s if warm_up.service else 0
        await self._ask("warm", args, code, parse=_nothing, timeout_s=timeout_s)

    @asynccontextmanager
    async def run(self, request: RunCode) -> AsyncIterator[Run]:
        """Run code. Leaving the block before the run has finished stops it."""
        code, args = _encoded(request.code), parsing.run_args(request)
        if request.kind != "code" or request.options is not None:
            args.update(kind=request.kind, code_bytes=len(code))
            code = _small(code + encode_json(dict(request.options or {})))

        async def stop() -> None:
            await self._ask("stop", {"run": number}, parse=_nothing)

        run = Run(request, stop)
        number = self._register(run)
        try:
            await self._send(number, "run", args, code)
        except BaseException:  # never sent: there is nothing to stop
            self._open.pop(number, None)
            raise
        try:
            yield run
        finally:
            if number in self._open:
                await self._end(run, number)

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

    async def write(self, path: str, data: bytes, *, append: bool = False, mode: int | None = None) -> FileInfo:
        """Write a file, making its parent directories. It is replaced in one step unless `append` is set."""
        upload = secrets.randbits(48)
        sent = 0
        try:
            while True:
                part = data[sent : sent + MAX_BODY]
                last = sent + len(part) >= len(data)
                args = {"path": path, "append": append, "mode": mode, "upload": upload, "last": last}
                info = await self._ask("write", args, part, parse=partial(parsing.parse_written, last=last))
                sent += len(part)
                if info is not None:
                    return info
        except BaseException as error:
            if len(data) > MAX_BODY and not isinstance(error, GuestError):
                await self._abandon(upload)
            raise

    async def list(self, path: str, *, recursive: bool, max_entries: int) -> Listing:
        """The entries of a directory, without following links."""
        args = {"path": path, "recursive": recursive, "max_entries": max_entries}
        return await self._ask("list", args, parse=lambda frame: parsing.parse_listing(frame, max_entries))

    async def stat(self, path: str) -> FileInfo:
        """What is at a path; a link is described itself, not followed."""
        return await self._ask("stat", {"path": path}, parse=lambda f: parsing.parse_file_info(f.header.get("file")))

    async def remove(self, path: str) -> None:
        """Remove a file, a link or an empty directory."""
        await self._ask("remove", {"path": path}, parse=_nothing)

    async def usage(self) -> GuestUsage:
        """What the machine says about its memory and disk."""
        return await self._ask("usage", {}, parse=lambda frame: parsing.parse_usage(frame.header))

    # ---------------------------------------------------------------- requests

    async def _ask(
        self,
        op: str,
        args: dict[str, Any],
        body: bytes = b"",
        *,
        parse: Callable[[Frame], T],
        timeout_s: float | None = None,
    ) -> T:
        """Send a request and return its parsed answer. A request nobody waits for any more is forgotten."""
        answer = _Answer()
        number = self._register(answer)
        try:
            with anyio.move_on_after(self._timeout_s if timeout_s is None else timeout_s):
                await self._send(number, op, args, body)
                await answer.done.wait()
        finally:
            if self._open.pop(number, None) is not None:
                self._forgotten.add(number)
        if answer.failure is not None:
            raise answer.failure
        if answer.frame is None:
            raise AgentTimeout(f"the agent did not answer {op!r} in time")
        try:
            return parse(answer.frame)
        except ProtocolError as error:
            self._break(error)
            raise

    def _register(self, entry: _Answer | Run) -> int:
        if self._broken is not None:
            raise self._broken
        if len(self._open) >= MAX_OPEN_REQUESTS:
            raise RequestRefused("busy", f"{MAX_OPEN_REQUESTS} requests are open on this machine already")
        self._last_id += 1
        self._open[self._last_id] = entry
        return self._last_id

    async def _send(self, number: int, op: str, args: dict[str, Any], body: bytes) -> None:
        """Put one frame on the wire. Half a frame would break the stream: once begun, it is not cancelled."""
        data = encode({"id": number, "op": op, **args}, body)
        async with self._sending:
            if self._broken is not None:
                raise self._broken
            try:
                with anyio.fail_after(self._timeout_s, shield=True):
                    await self._stream.send(data)
            except TimeoutError:
                raise self._break(AgentTimeout("the agent does not read what it is sent")) from None
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
                raise self._break(AgentGone("the stream to the agent is closed")) from error

    async def _end(self, run: Run, number: int) -> None:
        """Stop a run its user has left. A run that cannot be stopped breaks the client."""
        limit = run.request.grace_s + KILL_MARGIN_S
        try:
            with anyio.move_on_after(limit, shield=True):
                await run.stop()
                await run.wait_finished()
                return
            self._break(AgentTimeout(f"a run could not be stopped within {limit} s"))
        except GuestError:
            pass  # recorded where it happened; what ends the block matters more
        finally:
            self._open.pop(number, None)

    async def _abandon(self, upload: int) -> None:
        """Tell the agent to forget a half-sent file."""
        try:
            with anyio.CancelScope(shield=True):
                await self._ask("abandon", {"upload": upload}, parse=_nothing)
        except GuestError:
            pass

    # ---------------------------------------------------------------- the reader

    async def _greet(self) -> None:
        nonce = secrets.token_hex(8)
        args = {"version": PROTOCOL_VERSION, "nonce": nonce}
        self.hello = await self._ask("hello", args, parse=lambda f: parsing.parse_hello(f.header, nonce))

    async def _introduce(self, identity: Identity) -> None:
        self.refreshed = await self.refresh(identity)

    async def _read(self) -> None:
        """Hand every frame to whom it belongs, until the stream ends or the agent breaks the protocol."""
        decoder = Decoder(seeking=True)
        try:
            while True:
                for frame in decoder.feed(await self._stream.receive(READ_BYTES)):
                    self._dispatch(frame)
        except ProtocolError as error:
            self._break(error)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self._break(AgentGone("the machine's agent closed the stream"))
        except anyio.get_cancelled_exc_class():
            self._break(
                AgentGone("nobody listens to the machine's agent any more")
            )  # who still waits would wait in vain
            raise
        except Exception as error:  # a fault of ours that the agent found; whoever waits for an answer has to know
            fault = ProtocolError(f"what the agent sent could not be handled: {error!r}")
            fault.__cause__ = error
            self._break(fault)

    def _dispatch(self, frame: Frame) -> None:
        number = frame.header.get("id")
        if type(number) is not int or not self._first_id < number <= self._last_id:
            if not self._greeted:  # the end of an earlier conversation
                return
            raise ProtocolError(f"the agent answers a request that was never made: {str(number)[:60]!r}")
        self._greeted = True
        entry = self._open.get(number)
        if entry is not None:
            if entry.take(frame):
                del self._open[number]
        elif number in self._forgotten and "ok" in frame.header:
            self._forgotten.remove(number)
        else:
            raise ProtocolError("the agent goes on answering a request that has ended")

    def _break(self, error: GuestError) -> GuestError:
        """Fail all open requests, and every later one."""
        if self._broken is None:
            self._broken = error
            self._breaking.set()
        for entry in self._open.values():
            entry.fail(self._broken)
        self._open.clear()
        return error


def _nothing(_frame: Frame) -> None:
    """Parse an answer that carries nothing."""


def _encoded(code: str) -> bytes:
    return _small(code.encode("utf-8", "replace"))


def _small(data: bytes) -> bytes:
    if len(data) > MAX_BODY:
        raise RequestRefused(
            "too_large", f"code and data of {len(data)} bytes; the limit is {MAX_BODY}: write it to a file"
        )
    return data
