"""An ordinary `initialize` is answered before the SDK is there, exactly as the SDK answers it."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.early import EarlyGreeting
from mcp_sandbox.serving.greeting import Greeting
from mcp_sandbox.serving.initialize import VERSIONS, parse_initialize
from mcp_sandbox.serving.server import create_server
from mcp_sandbox.serving.stdio import message_streams
from tests.unit.fakes import FACTS, FakeProvider
from tests.waiting import HANG_S

MAX_BYTES = 1 << 20
CLIENT = {"name": "test", "version": "1"}
CAPABILITIES: list[dict[str, Any]] = [
    {},
    {"roots": {"listChanged": True}, "sampling": {}, "elicitation": {}},
    {"roots": {}, "sampling": {"tools": {}, "context": {}}, "elicitation": {"form": {}, "url": {}}},
    {"experimental": {"x": {"y": {"listChanged": False}}}, "unknown": {"z": {}}},
]


def initialize(number: object = 1, version: str = VERSIONS[-1], **params: object) -> dict[str, Any]:
    ordinary = {"protocolVersion": version, "capabilities": {}, "clientInfo": CLIENT}
    return {"jsonrpc": "2.0", "id": number, "method": "initialize", "params": ordinary | params}


class Client:
    """Speaks to a server through pipes. The SDK is there once `greeting` says so."""

    def __init__(self, to_server: int, from_server: int, greeting: Greeting) -> None:
        self.greeting = greeting
        self._to_server = to_server
        self._from_server = from_server
        self._unread = b""

    def send(self, message: dict[str, Any]) -> None:
        os.write(self._to_server, json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        while b"\n" not in self._unread:
            await anyio.wait_readable(self._from_server)
            self._unread += os.read(self._from_server, 1 << 16)
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)  # type: ignore[no-any-return]


@asynccontextmanager
async def connected(early: EarlyGreeting | None = None) -> AsyncIterator[Client]:
    """A client of a server whose SDK is not there yet, as far as its streams know."""
    settings, greeting, ended = Settings(), Greeting(early), anyio.Event()
    server = create_server(settings, str(FACTS), lambda: SandboxService(FakeProvider(), settings))
    (server_in, client_out), (client_in, server_out) = os.pipe(), os.pipe()
    lowlevel = server._lowlevel_server

    async def serve() -> None:
        async with message_streams(server_in, server_out, MAX_BYTES, greeting, ended) as (incoming, outgoing):
            await greeting.sdk_ready.wait()
            await lowlevel.run(incoming, outgoing, lowlevel.create_initialization_options())

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            yield Client(client_out, client_in, greeting)
            greeting.sdk_ready.set()
            os.close(client_out)
    for fd in (server_in, client_in, server_out):
        os.close(fd)


async def sdk_answer(message: dict[str, Any]) -> dict[str, Any]:
    async with connected() as client:
        client.greeting.sdk_ready.set()
        client.send(message)
        return await client.receive()


@pytest.mark.parametrize("number", [1, 0, -7, "a-1"])
@pytest.mark.parametrize("version", VERSIONS)
async def test_the_early_answer_is_that_of_the_sdk(number: object, version: str):
    async with connected() as client:
        client.send(initialize(number, version))
        early = await client.receive()
    assert early == await sdk_answer(initialize(number, version))


@pytest.mark.parametrize("capabilities", CAPABILITIES)
async def test_what_is_answered_early_is_accepted_by_the_sdk(capabilities: dict[str, Any]):
    client = CLIENT | {"title": "T", "description": "d", "websiteUrl": "http://127.0.0.1/"}
    message = initialize(capabilities=capabilities, clientInfo=client)
    assert parse_initialize(json.dumps(message).encode()) == message
    assert "result" in await sdk_answer(message)


async def test_an_early_answer_is_given_once_and_the_session_goes_on():
    async with connected() as client:
        client.send(initialize(1))
        assert (await client.receive())["id"] == 1
        client.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        client.send({"jsonrpc": "2.0", "id": 2, "method": "tools/list"})
        client.greeting.sdk_ready.set()
        answer = await client.receive()
        assert (answer["id"], bool(answer["result"]["tools"])) == (2, True)
        client.send({"jsonrpc": "2.0", "id": 1, "method": "ping"})
        assert await client.receive() == {"jsonrpc": "2.0", "id": 1, "result": {}}


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
        initialize(version="1999-01-01"),
        initialize(version="2026-07-28"),
        initialize(None),
        initialize(True),
        initialize(1.0),
        initialize(2**60),
        initialize("\ud800"),
        initialize(capabilities={"roots": {"listChanged": "yes"}}),
        initialize(capabilities={"sampling": True}),
        initialize(capabilities=None),
        initialize(clientInfo={"name": "test"}),
        initialize(clientInfo=CLIENT | {"icons": []}),
        initialize(_meta={}),
        [initialize()],
        1,
    ],
)
def test_anything_else_is_left_to_the_sdk(message: object):
    assert parse_initialize(json.dumps(message).encode()) is None


@pytest.mark.parametrize(
    "line",
    [b"{", b"\xff", b"[" * 100_000, json.dumps(initialize()).encode("utf-16")],
    ids=["no JSON", "no UTF-8", "too deep", "UTF-16"],
)
def test_a_line_that_cannot_be_read_is_left_to_the_sdk(line: bytes):
    assert parse_initialize(line) is None


async def test_what_was_read_and_answered_early_is_not_answered_again():
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    received = b"".join(json.dumps(message).encode() + b"\n" for message in (initialize(), ping))
    async with connected(EarlyGreeting(received, 1)) as client:
        client.greeting.sdk_ready.set()
        assert await client.receive() == {"jsonrpc": "2.0", "id": 2, "result": {}}
