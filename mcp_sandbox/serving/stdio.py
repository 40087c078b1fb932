"""The process's stdin and stdout as MCP streams that can be cancelled.

The SDK reads stdin in a worker thread. Nothing can interrupt a blocking read in a thread, so a server that has to
stop would wait for its client. Here the event loop waits instead, and only reads and writes what does not block.
"""

import logging
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from mcp_sandbox.serving.messages import END_BYTES, InvalidMessage, parse_message, too_long

READ_BYTES = 1 << 16
PIPE_WRITE_BYTES = 4096  # PIPE_BUF: what a pipe that polls as writable takes without blocking

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]

logger = logging.getLogger(__name__)


class LineReader:
    """Lines from a file descriptor. A line that is too long is refused; only its ends are kept."""

    def __init__(self, fd: int, max_bytes: int, refuse: Callable[[bytes, bytes], Awaitable[None]]) -> None:
        self._fd = fd
        self._max_bytes = max_bytes
        self._refuse = refuse

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pending = bytearray()
        start = b""  # of a line that is too long already
        while True:
            searched = len(pending)
            await _ready(anyio.wait_readable, self._fd)
            chunk = os.read(self._fd, READ_BYTES)
            pending += chunk
            while (end := pending.find(b"\n", searched)) >= 0:
                line = pending[: end + 1]
                del pending[: end + 1]
                searched = 0
                if start or len(line) > self._max_bytes:
                    await self._refuse(start or bytes(line[:END_BYTES]), bytes(line[-END_BYTES:]))
                    start = b""
                else:
                    yield bytes(line)
            if len(pending) > self._max_bytes:
                start = start or bytes(pending[:END_BYTES])
                del pending[:-END_BYTES]
            if not chunk:
                break
        if pending.strip() and not start:
            yield bytes(pending)


class TextWriter:
    """Text to a file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = anyio.Lock()

    async def write(self, text: str) -> None:
        """Write all of `text`.

        Raises:
            anyio.ClosedResourceError: the reader is gone.
        """
        rest = memoryview(text.encode())
        try:
            async with self._turn:
                while rest:
                    await _ready(anyio.wait_writable, self._fd)
                    rest = rest[os.write(self._fd, rest[:PIPE_WRITE_BYTES]) :]
        except BrokenPipeError:
            raise anyio.ClosedResourceError from None


@asynccontextmanager
async def message_streams(wire_in: int, wire_out: int, max_bytes: int, ended: anyio.Event) -> AsyncIterator[Streams]:
    """Yield the client's messages and a stream for the server's. `ended` is set at the end of the client's."""
    writer = TextWriter(wire_out)

    async def refuse(start: bytes, end: bytes) -> None:
        await writer.write(too_long(start, end, max_bytes))

    to_server, incoming = anyio.create_memory_object_stream[SessionMessage | Exception]()
    outgoing, from_server = anyio.create_memory_object_stream[SessionMessage]()
    async with anyio.create_task_group() as tasks, incoming, outgoing:
        tasks.start_soon(_receive, LineReader(wire_in, max_bytes, refuse), to_server, writer, ended)
        tasks.start_soon(_send, from_server, writer)
        yield incoming, outgoing


async def _receive(
    lines: AsyncIterable[bytes],
    to_server: MemoryObjectSendStream[SessionMessage | Exception],
    writer: TextWriter,
    ended: anyio.Event,
) -> None:
    try:
        async with to_server:
            async for line in lines:
                if line.isspace():
                    continue
                try:
                    await to_server.send(SessionMessage(parse_message(line)))
                except InvalidMessage as invalid:
                    logger.info("the client sent an invalid message of %d bytes", len(line))
                    await writer.write(invalid.answer)
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        pass  # the client, or our own server, is gone
    finally:
        ended.set()


async def _send(from_server: MemoryObjectReceiveStream[SessionMessage], writer: TextWriter) -> None:
    with suppress(anyio.ClosedResourceError):  # the client is gone
        async with from_server:
            async for message in from_server:
                await writer.write(message.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n")


async def _ready(wait: Callable[[int], Awaitable[None]], fd: int) -> None:
    # A regular file cannot be polled and never blocks.
    with suppress(PermissionError):
        await wait(fd)


@contextmanager
def claimed_stdio() -> Iterator[tuple[int, int]]:
    """Yield the descriptors of the wire. Meanwhile fd 0 is empty and fd 1 is stderr.

    So nothing that prints by accident, in this process or a child, can damage the protocol.
    """
    wire_in, wire_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(null, 0)
        os.dup2(2, 1)
        yield wire_in, wire_out
    finally:
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        for fd in (wire_in, wire_out, null):
            os.close(fd)
