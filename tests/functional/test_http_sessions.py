"""Clients that lose their connection in the middle of a run, over real HTTP."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from guest.client.messages import Output
from tests.functional.http_fake import serving_fakes
from tests.functional.mcp_client import text_of
from tests.unit.fakes import FakeProvider, finished
from tests.waiting import HANG_S

BOTH = {"Accept": "application/json, text/event-stream"}
PROTOCOL = "io.modelcontextprotocol"


class Slow:
    """A run that ends when a test wants it to."""

    code = "slow"

    def __init__(self, provider: FakeProvider) -> None:
        self.may_end = anyio.Event()
        provider.plans[self.code] = [Output("stdout", "begun\n"), self.may_end, Output("stdout", "done\n"), finished()]


class LegacySession:
    """A session of 2025-11-25, message by message."""

    def __init__(self, http: httpx2.AsyncClient, address: str) -> None:
        self._http = http
        self._address = address
        self._headers = dict(BOTH)
        self._last_id = 0

    async def open(self) -> None:
        client = {"name": "raw", "version": "0"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        async with self.post("initialize", params) as response:
            self._headers |= {
                "MCP-Session-Id": response.headers["mcp-session-id"],
                "MCP-Protocol-Version": "2025-11-25",
            }
            await answer_in(response)

    @asynccontextmanager
    async def post(self, method: str, params: dict[str, Any]) -> AsyncIterator[httpx2.Response]:
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        async with self._http.stream("POST", self._address, json=message, headers=self._headers) as response:
            yield response

    @asynccontextmanager
    async def call(self, tool: str, **arguments: object) -> AsyncIterator[httpx2.Response]:
        async with self.post("tools/call", {"name": tool, "arguments": arguments}) as response:
            yield response

    @asynccontextmanager
    async def resume(self, event_id: str) -> AsyncIterator[httpx2.Response]:
        headers = {**self._headers, "Last-Event-ID": event_id}
        async with self._http.stream("GET", self._address, headers=headers) as response:
            yield response


async def first_event_id(response: httpx2.Response) -> str:
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            return line.removeprefix("id: ")
    raise AssertionError("the stream has no event ids")


async def messages_in(response: httpx2.Response) -> list[dict[str, Any]]:
    return [
        json.loads(line.removeprefix("data: "))
        async for line in response.aiter_lines()
        if line.startswith("data: ") and line != "data: "
    ]


async def answer_in(response: httpx2.Response) -> dict[str, Any]:
    result: dict[str, Any] = (await messages_in(response))[-1]["result"]
    return result


@asynccontextmanager
async def session(address: str) -> AsyncIterator[LegacySession]:
    async with httpx2.AsyncClient(timeout=HANG_S) as http:
        opened = LegacySession(http, address)
        await opened.open()
        yield opened


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


async def begin(client: LegacySession, slow: Slow, provider: FakeProvider) -> str:
    """Start a run and lose the connection; return the id of the last event that came."""
    async with client.call("create_sandbox") as response:
        sandbox_id = (await answer_in(response))["structuredContent"]["sandbox_id"]
    async with client.call("run_code", code=slow.code, sandbox_id=sandbox_id) as response:
        event_id = await first_event_id(response)
        await provider.agent.running.wait()
    return event_id


async def test_a_legacy_run_goes_on_without_its_client_who_reads_on_later(provider: FakeProvider):
    slow = Slow(provider)
    with anyio.fail_after(HANG_S):
        async with serving_fakes(provider) as address, session(address) as client:
            event_id = await begin(client, slow, provider)
            async with client.resume(event_id) as response:
                slow.may_end.set()
                assert "done" in (await answer_in(response))["content"][0]["text"]
            async with client.resume(event_id) as response:  # lost again, after the end
                assert "done" in (await answer_in(response))["content"][0]["text"]
    assert provider.agent.stops == 0


async def test_no_session_reads_what_another_has_missed(provider: FakeProvider):
    slow = Slow(provider)
    slow.may_end.set()
    with anyio.fail_after(HANG_S):
        async with serving_fakes(provider) as address, session(address) as hers, session(address) as his:
            event_id = await begin(hers, slow, provider)
            for number in range(1, int(event_id) + 3):
                async with his.resume(str(number)) as response:
                    read = await messages_in(response) if response.status_code == 200 else []
                    assert [message for message in read if "done" in json.dumps(message)] == []
            async with hers.resume(event_id) as response:
                assert "done" in (await answer_in(response))["content"][0]["text"]


async def test_a_client_that_cannot_read_on_learns_it_at_once(provider: FakeProvider):
    with anyio.fail_after(HANG_S):
        async with serving_fakes(provider) as address, session(address) as client, client.resume("99") as response:
            assert response.status_code == 400
            assert "not kept" in (await response.aread()).decode()


class CutOnce(httpx2.AsyncHTTPTransport):
    """Loses the connection of the first request for a slow run, after the first part of its answer."""

    cut = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if b'"slow"' in request.content and not self.cut:
            self.cut = True
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = FirstPart(response.stream)
        return response


class FirstPart(httpx2.AsyncByteStream):
    def __init__(self, whole: httpx2.AsyncByteStream) -> None:
        self._whole = whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._whole:
            yield part
            return

    async def aclose(self) -> None:
        await self._whole.aclose()


async def test_the_sdks_client_gets_its_answer_over_a_second_connection(provider: FakeProvider):
    slow = Slow(provider)
    transport = CutOnce()
    with anyio.fail_after(HANG_S):
        async with (
            serving_fakes(provider) as address,
            httpx2.AsyncClient(transport=transport, timeout=HANG_S) as http,
            Client(streamable_http_client(address, http_client=http), mode="legacy") as client,
            anyio.create_task_group() as tasks,
        ):

            async def end_after_the_cut() -> None:
                while not transport.cut:
                    await anyio.sleep(0)
                slow.may_end.set()

            tasks.start_soon(end_after_the_cut)
            assert "done" in text_of(await client.call_tool("run_code", {"code": slow.code}))
    assert transport.cut


async def test_closing_the_stream_of_a_stateless_call_cancels_its_run(provider: FakeProvider):
    meta = {f"{PROTOCOL}/protocolVersion": "2026-07-28", f"{PROTOCOL}/clientCapabilities": {}}
    params = {"name": "run_code", "arguments": {"code": "forever", "timeout_s": 600}, "_meta": meta}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {
        **BOTH,
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/call",
        "Mcp-Name": "run_code",
    }
    with anyio.fail_after(HANG_S):
        async with serving_fakes(provider) as address, httpx2.AsyncClient(timeout=HANG_S) as http:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: http.post(address, json=message, headers=headers))
                await provider.waiting.wait()
                while not provider.agents:
                    await anyio.sleep(0)
                await provider.agent.running.wait()
                tasks.cancel_scope.cancel()
            await provider.released.wait()  # a one-off run that is cancelled ends its sandbox
