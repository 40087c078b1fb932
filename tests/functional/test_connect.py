"""`mcp-sandbox --connect`: clients on stdio that share one server."""

import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from mcp.client import Client
from mcp.server.mcpserver import Context
from mcp_types import ElicitRequestParams, ElicitResult

from mcp_sandbox.accounts.tokens import Token
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.server import SandboxServer
from tests.functional import conformance_questions
from tests.functional.http_fake import finding, serving_fakes
from tests.functional.mcp_client import call, connect_parameters, data_of, server_environment, text_of
from tests.functional.raw_client import RawClient, started
from tests.unit.fakes import FakeProvider
from tests.waiting import HANG_S

CLOSED = "http://127.0.0.1:1/mcp"  # a port that nothing listens on
INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "0"}}


@asynccontextmanager
async def connecting(directory: Path, address: str, *options: str, **settings: str) -> AsyncIterator[RawClient]:
    argv = [sys.executable, "-m", "mcp_sandbox", *options, "--connect", address]
    async with started(argv, directory / "stderr", server_environment(**settings)) as client:
        yield client


async def error_from(client: RawClient) -> dict[str, Any]:
    await client.send("tools/list", {}, id="x")
    answer = await client.receive()
    assert answer["id"] == "x"
    error: dict[str, Any] = answer["error"]
    return error


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_clients_on_stdio_share_the_sandboxes_of_one_server(mode: str):
    with anyio.fail_after(HANG_S):
        async with (
            serving_fakes(FakeProvider()) as address,
            Client(connect_parameters(address), mode=mode) as first,
            Client(connect_parameters(address), mode=mode) as second,
        ):
            sandbox_id = (await data_of(first, "create_sandbox"))["sandbox_id"]
            [listed] = (await data_of(second, "list_sandboxes"))["sandboxes"]
            assert listed["sandbox_id"] == sandbox_id
            assert "[ok" in text_of(await call(second, "run_code", code="1", sandbox_id=sandbox_id))


async def test_many_calls_at_once_get_their_own_answers():
    with anyio.fail_after(HANG_S):
        async with serving_fakes(FakeProvider()) as address, Client(connect_parameters(address)) as client:
            sandbox_id = (await data_of(client, "create_sandbox"))["sandbox_id"]
            read: dict[str, str] = {}

            async def write_and_read(path: str) -> None:
                await call(client, "write_file", sandbox_id=sandbox_id, path=path, content=f"in {path}")
                read[path] = text_of(await call(client, "read_file", sandbox_id=sandbox_id, path=path))

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(write_and_read, f"/workspace/{number}")
            assert [f"in {path}" in text for path, text in read.items()] == 20 * [True]


async def test_a_server_that_is_not_there_is_an_error_and_not_silence(tmp_path: Path):
    async with connecting(tmp_path, CLOSED) as client:
        error = await error_from(client)
        assert CLOSED in error["message"]
        assert "refused" in error["message"]
        await client.close_stdin()
        assert await client.exit_status() == 0


async def test_the_address_may_come_with_other_options(tmp_path: Path):
    async with connecting(tmp_path, CLOSED, "--log-level", "INFO") as client:
        assert CLOSED in (await error_from(client))["message"]


async def test_a_line_that_is_no_json_is_an_error(tmp_path: Path):
    async with connecting(tmp_path, CLOSED) as client:
        await client.send_line(b"{")
        assert (await client.receive())["error"]["code"] == -32700


async def test_an_address_that_is_no_url_ends_the_program(tmp_path: Path):
    async with connecting(tmp_path, "127.0.0.1:8000") as client:
        assert await client.exit_status() == 2
    assert "127.0.0.1:8000 is not the address of a server" in (tmp_path / "stderr").read_text()


async def test_the_token_of_the_environment_opens_the_server(tmp_path: Path):
    async with serving_fakes(FakeProvider(), find_token=finding({"right": Token("ana", "ana")})) as address:
        async with connecting(tmp_path, address, token="right") as client:
            await client.start()
        async with connecting(tmp_path, address, token="wrong") as client:
            assert "Send a valid token" in (await error_from(client))["message"]


async def test_a_client_does_not_notice_that_the_server_has_restarted(tmp_path: Path):
    async with serving_fakes(FakeProvider()) as address:
        pass
    again = Settings(serve={"port": int(address.rpartition(":")[2].removesuffix("/mcp"))})
    async with connecting(tmp_path, address) as client:
        async with serving_fakes(FakeProvider(), settings=again):
            await client.ask("initialize", INITIALIZE)
            await client.send("notifications/initialized", {})
            await client.call("list_sandboxes")
        assert "refused" in (await error_from(client))["message"]
        async with serving_fakes(FakeProvider(), settings=again):
            assert (await client.call("list_sandboxes"))["structuredContent"]["sandboxes"] == []


def add_a_tool_that_loses_its_connection(server: SandboxServer) -> None:
    @server.tool()
    async def lose(ctx: Context[Any, Any]) -> str:
        await ctx.close_sse_stream()
        return "found again"


async def test_an_answer_is_read_on_after_a_lost_connection(tmp_path: Path):
    async with (
        serving_fakes(FakeProvider(), add_a_tool_that_loses_its_connection) as address,
        connecting(tmp_path, address) as client,
    ):
        await client.ask("initialize", INITIALIZE)
        await client.send("notifications/initialized", {})
        assert "found again" in json.dumps(await client.call("lose"))


def add_a_tool_that_tells_of_a_change(server: SandboxServer) -> None:
    @server.tool()
    async def change(ctx: Context[Any, Any]) -> str:
        await ctx.session.send_tool_list_changed()
        return "changed"


async def test_what_a_server_sends_by_itself_reaches_the_client(tmp_path: Path):
    async with (
        serving_fakes(FakeProvider(), add_a_tool_that_tells_of_a_change) as address,
        connecting(tmp_path, address) as client,
    ):
        await client.ask("initialize", INITIALIZE)
        await client.send("notifications/initialized", {})
        heard = False
        for number in itertools.count():  # until the relay listens
            await client.start_call("change", request_id=f"c{number}")
            while (message := await client.receive()).get("id") != f"c{number}":
                heard = heard or message["method"] == "notifications/tools/list_changed"
            if heard:
                break


async def test_a_tool_can_ask_the_user_of_a_client_on_stdio():
    async def agree(context: object, params: ElicitRequestParams) -> ElicitResult:
        return ElicitResult(action="accept", content={"username": params.message, "email": "a@b"})

    with anyio.fail_after(HANG_S):
        async with (
            serving_fakes(FakeProvider(), conformance_questions.register) as address,
            Client(connect_parameters(address), mode="legacy", elicitation_callback=agree) as client,
        ):
            assert '"username": "Who?"' in text_of(await call(client, "test_elicitation", message="Who?"))


async def test_the_end_of_stdin_ends_what_still_runs(tmp_path: Path):
    provider = FakeProvider()
    async with serving_fakes(provider) as address, connecting(tmp_path, address) as client:
        sandbox_id = await client.start()
        await client.start_call("run_code", code="forever", sandbox_id=sandbox_id, timeout_s=600)
        await provider.agent.running.wait()
        await client.close_stdin()
        assert await client.exit_status() == 0
        with anyio.fail_after(HANG_S):
            while provider.agent.stops == 0:
                await anyio.sleep(0.01)


async def test_a_server_that_falls_silent_does_not_keep_the_client_waiting_at_its_end(tmp_path: Path):
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"protocolVersion": "2025-11-25"}})
    head = f"HTTP/1.1 200 OK\r\nMcp-Session-Id: s\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    async def answer_once(stream: SocketStream) -> None:
        async with stream:
            await stream.send(f"{head}\r\n\r\n{body}".encode())
            await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer_once)
        address = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}/mcp"
        async with connecting(tmp_path, address) as client:
            await client.ask("initialize", INITIALIZE)
            await client.close_stdin()
            assert await client.exit_status() == 0
        tasks.cancel_scope.cancel()
