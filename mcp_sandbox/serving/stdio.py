"""The process's stdin and stdout as MCP streams that can be cancelled.

Reading begins before the SDK is imported: see `greeting`.
"""

import logging
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from mcp_sandbox.serving.greeting import Greeting
from mcp_sandbox.serving.wire import LineReader, TextWriter

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.shared.message import SessionMessage

    Incoming = SessionMessage | Exception
    Streams = tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]

logger = logging.getLogger(__name__)


@asynccontextmanager
async def message_streams(
    wire_in: int, wire_out: int, max_bytes: int, greeting: Greeting, ended: anyio.Event
) -> AsyncIterator["Streams"]:
    """Yield the client's messages and a stream for the server's. `ended` is set at the end of the client's.

    Messages arrive once the SDK is ready. `greeting` may answer the first one before.
    """
    writer = TextWriter(wire_out)

    async def refuse(start: bytes, end: bytes) -> None:
        await greeting.sdk_ready.wait()
        from mcp_sandbox.serving.messages import too_long

        await writer.write(too_long(start, end, max_bytes))

    to_server: MemoryObjectSendStream[Incoming]
    outgoing: MemoryObjectSendStream[SessionMessage]
    to_server, incoming = anyio.create_memory_object_stream()
    outgoing, from_server = anyio.create_memory_object_stream()
    async with anyio.create_task_group() as tasks, incoming, outgoing:
        lines = LineReader(wire_in, max_bytes, refuse, greeting.early.received)
        tasks.start_soon(_receive, lines, to_server, writer, greeting, ended)
        tasks.start_soon(_send, from_server, writer, greeting)
        yield incoming, outgoing


async def _receive(
    lines: AsyncIterable[bytes],
    to_server: "MemoryObjectSendStream[Incoming]",
    writer: TextWriter,
    greeting: Greeting,
    ended: anyio.Event,
) -> None:
    try:
        async with to_server:
            async for line in lines:
                if line.isspace():
                    continue
                if not greeting.sdk_ready.is_set():
                    await _greet(line, writer, greeting)
                await _pass_on(line, to_server, writer)
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        pass  # the client, or our own server, is gone
    finally:
        ended.set()


async def _greet(line: bytes, writer: TextWriter, greeting: Greeting) -> None:
    """Answer the client's first line, if it can be answered without the SDK, and wait for the SDK."""
    answer = greeting.answer(line)
    if answer is not None:
        await writer.write(answer)
    await greeting.sdk_ready.wait()


async def _pass_on(line: bytes, to_server: "MemoryObjectSendStream[Incoming]", writer: TextWriter) -> None:
    from mcp.shared.message import SessionMessage

    from mcp_sandbox.serving.messages import InvalidMessage, parse_message

    try:
        await to_server.send(SessionMessage(parse_message(line)))
    except InvalidMessage as invalid:
        logger.info("the client sent an invalid message of %d bytes", len(line))
        await writer.write(invalid.answer)


async def _send(
    from_server: "MemoryObjectReceiveStream[SessionMessage]", writer: TextWriter, greeting: Greeting
) -> None:
    with suppress(anyio.ClosedResourceError):  # the client is gone
        async with from_server:
            async for message in from_server:
                if not greeting.was_answered(getattr(message.message, "id", None)):
                    await writer.write(message.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n")
