"""Another owner's id gets the answer of an unknown one, byte for byte: on every tool, resource and route."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest

from mcp_sandbox.accounts.tokens import Token
from mcp_sandbox.config import Settings
from mcp_sandbox.rest.app import OPERATIONS
from mcp_sandbox.serving.tasks import EXTENSION
from tests.functional.http_fake import finding, serving_fakes
from tests.unit.fakes import FakeProvider
from tests.unit.test_rest import BODIES, QUERIES
from tests.waiting import HANG_S

ERA = "2026-07-28"
PROTOCOL = "io.modelcontextprotocol"
SETTINGS = Settings(serve={"port": 0}, toolsets=["advanced"])
STATES = ["ready", "running", "paused", "closed"]
ARGUMENTS: dict[str, dict[str, Any]] = {  # that a tool needs beside the sandbox
    "run_code": {"code": "1"},
    "run_command": {"command": "true"},
    "invoke_handler": {"code": "", "event": 1},
    "read_output": {"run_id": "run-1"},
    "stop_run": {"run_id": "run-1"},
    "read_file": {"path": "x"},
    "write_file": {"path": "x", "content": ""},
    "read_artifact": {"path": "x"},
    "fetch_url": {"url": "http://site.example/"},
}


class Client:
    """Sends raw requests with one token."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def mcp(self, method: str, target: str | None = None, **params: Any) -> httpx2.Response:
        capabilities: dict[str, Any] = {"extensions": {EXTENSION: {}}}
        meta = {f"{PROTOCOL}/protocolVersion": ERA, f"{PROTOCOL}/clientCapabilities": capabilities}
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
        headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": ERA, "Mcp-Method": method}
        if target is not None:
            headers["Mcp-Name"] = target
        return await self._http.post("/mcp", json=message, headers=headers)

    async def call(self, tool: str, **arguments: Any) -> httpx2.Response:
        return await self.mcp("tools/call", tool, name=tool, arguments=arguments)

    async def rest(self, method: str, path: str, **more: Any) -> httpx2.Response:
        return await self._http.request(method, f"/api/v1{path}", **more)


def shown(answer: httpx2.Response, sandbox_id: str) -> tuple[int, list[tuple[str, str]], str]:
    """All of an answer that may tell two ids apart."""
    assert sandbox_id in answer.text
    headers = [(name, value) for name, value in answer.headers.multi_items() if name != "date"]
    return answer.status_code, headers, answer.text.replace(sandbox_id, "ID")


@asynccontextmanager
async def two_owners(state: str) -> AsyncIterator[tuple[str, Client]]:
    """A sandbox of Ana's in some state, and Bob."""
    find = finding({"a": Token("ana", "ana"), "b": Token("bob", "bob")})
    with anyio.fail_after(HANG_S):
        async with serving_fakes(FakeProvider(), find_token=find, settings=SETTINGS) as address:
            base = address.removesuffix("/mcp")
            async with (
                httpx2.AsyncClient(base_url=base, headers={"Authorization": "Bearer a"}, timeout=HANG_S) as ana,
                httpx2.AsyncClient(base_url=base, headers={"Authorization": "Bearer b"}, timeout=HANG_S) as bob,
            ):
                hers = Client(ana)
                sandbox_id = (await hers.rest("POST", "/sandboxes")).json()["sandbox_id"]
                await bring(hers, f"/sandboxes/{sandbox_id}", state)
                yield sandbox_id, Client(bob)


async def bring(client: Client, path: str, state: str) -> None:
    code = "forever" if state == "running" else "1"
    run = await client.rest("POST", f"{path}/runs", json={"code": code, "background": state == "running"})
    assert run.json()["run_id"] == "run-1"
    if state == "paused":
        assert (await client.rest("POST", f"{path}/pause")).json()["state"] == "paused"
    if state == "closed":
        assert (await client.rest("DELETE", path)).json()["closed"]


def unknown() -> str:
    return f"sb-{secrets.token_hex(8)}"


@pytest.mark.parametrize("state", STATES)
async def test_every_tool_answers_alike(state: str):
    async with two_owners(state) as (hers, bob):
        listed = (await bob.mcp("tools/list")).json()["result"]["tools"]
        tools = [tool["name"] for tool in listed if "sandbox_id" in tool["inputSchema"]["properties"]]
        assert len(tools) > len(ARGUMENTS)
        for tool in tools:
            none = unknown()
            more = ARGUMENTS.get(tool, {})
            strange = shown(await bob.call(tool, sandbox_id=hers, **more), hers)
            assert strange == shown(await bob.call(tool, sandbox_id=none, **more), none)
            assert "does not exist" in strange[2]


@pytest.mark.parametrize("state", STATES)
async def test_every_request_about_a_task_answers_alike(state: str):
    async with two_owners(state) as (hers, bob):
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            none = unknown()
            answers = [
                shown(await bob.mcp(method, task, taskId=task, inputResponses={}), box)
                for box in (hers, none)
                for task in [f"{box}.run-1.19a0b0c0d0e"]
            ]
            assert answers[0] == answers[1]
            assert "does not exist" in answers[0][2]


@pytest.mark.parametrize("state", STATES)
async def test_every_route_answers_alike(state: str):
    routes = [operation for operation in OPERATIONS if "{sandbox_id}" in operation.path]
    async with two_owners(state) as (hers, bob):
        for route in routes:
            more = {"json": BODIES.get(route.name), "params": QUERIES.get(route.name)}
            path = route.path.replace("{run_id}", "run-1")
            none = unknown()
            strange = shown(await bob.rest(route.method, path.replace("{sandbox_id}", hers), **more), hers)
            assert strange == shown(await bob.rest(route.method, path.replace("{sandbox_id}", none), **more), none)
            assert '"code":"sandbox_not_found"' in strange[2]
        bodies = [{"url": "http://site.example/", "sandbox_id": box} for box in (hers, none)]
        strange, missing = [shown(await bob.rest("POST", "/web/fetch", json=b), b["sandbox_id"]) for b in bodies]
        assert strange == missing
        assert '"code":"sandbox_not_found"' in strange[2]


@pytest.mark.parametrize("state", STATES)
async def test_resources_answer_alike(state: str):
    async with two_owners(state) as (hers, bob):
        none = unknown()
        strange, missing = [
            shown(await bob.mcp("resources/read", f"sandbox://{box}/x", uri=f"sandbox://{box}/x"), box)
            for box in (hers, none)
        ]
        assert strange == missing
        assert "does not exist" in strange[2]
