"""Connections that bring no request, and too many of them, over real sockets."""

import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import pytest
from starlette.responses import PlainTextResponse

from mcp_sandbox.config import ServeSettings
from mcp_sandbox.serving import connections
from mcp_sandbox.serving.http import web_server
from tests.waiting import HANG_S

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """A server on a port."""
    with socket.create_server(("127.0.0.1", 0)) as listener, anyio.fail_after(HANG_S):
        server = web_server(PlainTextResponse("hello"), ServeSettings())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            yield listener.getsockname()[1]
            server.should_exit = True


async def read_to_end(stream: anyio.abc.ByteStream) -> bytes:
    data = b""
    try:
        while True:
            data += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return data


async def read_answer(stream: anyio.abc.ByteStream) -> None:
    data = b""
    while not data.endswith(b"hello"):
        data += await stream.receive()


@pytest.mark.parametrize("sent", [b"", REQUEST[:-2]], ids=["nothing", "half a head"])
async def test_a_connection_without_a_request_is_closed(monkeypatch, sent: bytes):
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    async with serving() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        if sent:
            await stream.send(sent)
        assert await read_to_end(stream) == b""


async def test_half_a_head_after_an_answer_does_not_keep_the_connection(monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    async with serving() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(REQUEST)
        await read_answer(stream)
        await stream.send(REQUEST[:-2])
        await read_to_end(stream)


async def test_a_connection_too_many_is_refused(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
    async with serving() as port, await anyio.connect_tcp("127.0.0.1", port) as first:
        await first.send(REQUEST)
        await read_answer(first)
        async with await anyio.connect_tcp("127.0.0.1", port) as second:
            assert await read_to_end(second) == b""
        await first.send(REQUEST)
        await read_answer(first)


def test_the_server_may_open_many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        connections.allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
