"""Background runs as tasks, through a real MCP client in memory."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, METHOD_NOT_FOUND, MISSING_REQUIRED_CLIENT_CAPABILITY, CallToolResult, TextContent

from guest.client.messages import Output
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.tasks import EXTENSION
from tests.unit.fakes import FakeProvider, finished
from tests.unit.http_harness import serving_http
from tests.unit.task_client import ERA, Tasks, ask, ended, start, state
from tests.unit.test_tools import server_over
from tests.waiting import HANG_S

PROTOCOL = "io.modelcontextprotocol"
METHODS: dict[str, dict[str, Any]] = {"tasks/get": {}, "tasks/update": {"inputResponses": {}}, "tasks/cancel": {}}


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@asynccontextmanager
async def connected(
    provider: FakeProvider, *extensions: Tasks, mode: str = ERA, **settings: Any
) -> AsyncIterator[Client]:
    with anyio.fail_after(HANG_S):
        async with Client(server_over(provider, Settings(**settings)), mode=mode, extensions=extensions) as client:
            yield client


def text_in(view: dict[str, Any]) -> str:
    return str(view["result"]["content"][0]["text"])


async def test_a_background_run_is_a_task_that_ends_with_the_runs_result(provider: FakeProvider):
    may_end = anyio.Event()
    provider.plans["slow"] = [may_end, Output("stdout", "done\n"), finished()]
    async with connected(provider, Tasks(), mode="auto") as client:
        assert EXTENSION in (client.server_capabilities.extensions or {})
        task = await start(client, "run_code", code="slow", background=True)
        working = await state(client, task)
        assert (working["taskId"], working["status"]) == (task.task_id, "working")
        assert "result" not in working
        may_end.set()
        over = await ended(client, task)
    assert over["status"] == "completed"
    assert "done" in text_in(over)
    assert over["result"]["isError"] is False
    assert over["resultType"] == "complete"
    assert over["createdAt"] == task.created_at <= over["lastUpdatedAt"]


async def test_a_run_that_takes_longer_than_clients_wait_becomes_a_task(provider: FakeProvider):
    async with connected(provider, Tasks(), runs={"foreground_s": 0.05}) as client:
        task = await start(client, "run_command", command="forever")
        assert (await state(client, task))["status"] == "working"


async def test_short_runs_and_other_tools_answer_as_always(provider: FakeProvider):
    async with connected(provider, Tasks()) as client:
        assert isinstance(await client.call_tool("run_code", {"code": "1"}), CallToolResult)
        task = await start(client, "run_code", code="forever", background=True)
        run = (task.meta or {})["mcp-sandbox/run"]
        ids = {"sandbox_id": run["sandbox_id"], "run_id": run["run_id"]}
        progress = await client.call_tool("read_output", {**ids, "wait_s": 0})
        assert isinstance(progress, CallToolResult)


@pytest.mark.parametrize("mode", ["legacy", ERA])
async def test_a_client_that_did_not_declare_the_extension_gets_a_run_id(provider: FakeProvider, mode: str):
    async with connected(provider, mode=mode) as client:
        result = await client.call_tool("run_code", {"code": "forever", "background": True})
        assert isinstance(result.content[0], TextContent)
        assert "run-1 is still running" in result.content[0].text
        for method, more in METHODS.items():
            with pytest.raises(MCPError) as refused:
                await ask(client, method, "sb-0.run-1.0", **more)
            expected = METHOD_NOT_FOUND if mode == "legacy" else MISSING_REQUIRED_CLIENT_CAPABILITY
            assert refused.value.code == expected


async def test_a_cancelled_task_stops_its_run(provider: FakeProvider):
    async with connected(provider, Tasks()) as client:
        task = await start(client, "run_code", code="forever", background=True)
        acknowledged = await ask(client, "tasks/cancel", task.task_id)
        assert acknowledged["resultType"] == "complete"
        assert "taskId" not in acknowledged
        assert provider.agent.stops == 1
        over = await state(client, task)
        assert over["status"] == "cancelled"
        assert "result" not in over
        await ask(client, "tasks/cancel", task.task_id)  # again, without effect
        assert await ask(client, "tasks/update", task.task_id, inputResponses={"unasked": {}})


async def test_a_lost_machine_is_a_result_that_says_so(provider: FakeProvider):
    async with connected(provider, Tasks()) as client:
        task = await start(client, "run_code", code="die", background=True)
        over = await ended(client, task)
    assert over["status"] == "completed"
    assert over["result"]["isError"] is True
    assert "was lost" in text_in(over)


@pytest.mark.parametrize("task_id", ["", "x", "sb-0123456789abcdef.run-1.0", "sb-1.run-1.zz", "a.b.c.d", "\0" * 256])
async def test_an_unknown_task_is_an_error_of_the_protocol(provider: FakeProvider, task_id: str):
    async with connected(provider, Tasks()) as client:
        for method, more in METHODS.items():
            with pytest.raises(MCPError) as refused:
                await ask(client, method, task_id, **more)
            assert refused.value.code == INVALID_PARAMS


async def test_a_task_ends_with_its_sandbox(provider: FakeProvider):
    async with connected(provider, Tasks()) as client:
        task = await start(client, "run_code", code="forever", background=True)
        sandbox_id = (task.meta or {})["mcp-sandbox/run"]["sandbox_id"]
        await client.call_tool("close_sandbox", {"sandbox_id": sandbox_id})
        with pytest.raises(MCPError, match="closed") as gone:
            await state(client, task)
    assert gone.value.code == INVALID_PARAMS


def test_a_client_that_did_not_declare_the_extension_cannot_listen_for_tasks(provider: FakeProvider):
    method = "subscriptions/listen"
    meta = {f"{PROTOCOL}/protocolVersion": ERA, f"{PROTOCOL}/clientCapabilities": {}}
    params = {"notifications": {"taskIds": ["sb-0.run-1.0"]}, "_meta": meta}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    with serving_http(provider) as http:
        answer = http.post("/mcp", body, {"MCP-Protocol-Version": ERA, "Mcp-Method": method})
    assert f'"code":{MISSING_REQUIRED_CLIENT_CAPABILITY}' in answer.text
