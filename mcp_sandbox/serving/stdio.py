"""The process's stdin and stdout as MCP streams that can be cancelled."""

import logging
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from mcp_sandbox.serving.messages import InvalidMessage, parse_message, too_long
from mcp_sandbox.serving.wire import LineReader, TextWriter

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]

logger = logging.getLogger(__name__)


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
