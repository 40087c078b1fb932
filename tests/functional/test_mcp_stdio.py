"""The server as a process: it speaks MCP on stdio and leaves nothing, however it ends."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import INVALID_REQUEST, PARSE_ERROR

from tests.functional.checkout import REPO
from tests.functional.raw_client import PARENT, RawClient, started
from tests.unit.test_toolsets import tokens
from tests.waiting import assert_soon_empty, promised

SERVER = (sys.executable, "-m", "tests.functional.stdio_fake")


@asynccontextmanager
async def serving(directory: Path, *prefix: str) -> AsyncIterator[RawClient]:
    """A server whose machines are files in `directory`. They are gone when it has ended."""
    async with started([*prefix, *SERVER, str(directory)], directory / "stderr", os.environ) as client:
        yield client
    assert machines(directory) == []


def machines(directory: Path) -> list[Path]:
    return list(directory.glob("machine-*"))


async def assert_server_ends(directory: Path) -> None:
    """Wait for a server that is not our child."""
    server = int((directory / "server.pid").read_text())
    await assert_soon_empty(lambda: psutil.pid_exists(server), promised())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_server_and_all_machines(tmp_path: Path, number: signal.Signals):
    async with serving(tmp_path) as client:
        await client.start()
        assert len(machines(tmp_path)) == 1
        client.process.send_signal(number)
        assert await client.exit_status() == 0


@pytest.mark.parametrize("code", ["forever", "stubborn"])
async def test_the_end_of_stdin_ends_a_server_in_the_middle_of_a_run(tmp_path: Path, code: str):
    async with serving(tmp_path) as client:
        await client.start_call("run_code", code=code, sandbox_id=await client.start())
        await client.close_stdin()
        assert await client.exit_status() == 0


async def test_a_signal_ends_a_server_in_the_middle_of_a_run(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.start_call("run_code", code="forever", sandbox_id=await client.start())
        client.process.terminate()
        assert await client.exit_status() == 0


async def test_the_server_ends_with_its_parent_even_if_stdin_stays_open(tmp_path: Path):
    async with serving(tmp_path, *PARENT) as client:
        await client.start()
        assert int((tmp_path / "server.pid").read_text()) != client.process.pid
        client.process.kill()
        await client.exit_status()
        await assert_server_ends(tmp_path)


async def test_a_client_that_stops_reading_does_not_keep_the_server_alive(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.start()
        for number in range(200):  # answers to these fill the pipe
            await client.send("tools/list", {}, id=f"unread-{number}")
        client.process.terminate()
        assert await client.exit_status() == 0


async def test_answers_larger_than_the_pipe_arrive_whole(tmp_path: Path):
    async with serving(tmp_path) as client:
        box = await client.start()
        content = "é" * 1_000_000
        written = await client.call("write_file", sandbox_id=box, path="big", content=content)
        assert written["structuredContent"]["size"] == 2_000_000
        read = await client.ask("resources/read", {"uri": f"sandbox://{box}/workspace/big"})
        assert read["contents"][0]["text"] == content


BAD_LINES = (
    b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":' + b"9" * 100_000 + b"}}",
    b"\xff\xfe",
    b"[]",
    b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}',
)


async def test_every_message_that_cannot_be_read_is_answered_and_the_server_goes_on(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.start()
        for line in BAD_LINES:
            await client.send_line(line)
            assert (await client.receive())["error"]["code"] in (PARSE_ERROR, INVALID_REQUEST)
        await client.send_line(b" \n\n")
        for number in range(1000):  # of requests that never were
            await client.send("notifications/cancelled", {"requestId": f"unknown-{number}"})
        assert (await client.call("list_sandboxes"))["structuredContent"]["sandboxes"]


async def test_the_list_of_tools_has_nothing_but_what_clients_need(tmp_path: Path):
    async with serving(tmp_path) as client:
        await client.start()
        tools = (await client.ask("tools/list", {}))["tools"]
    for tool in tools:
        assert set(tool) == {"name", "title", "description", "inputSchema", "annotations"}
        assert None not in tool["annotations"].values()
    assert tokens(tools) <= 3500


async def test_the_sdks_own_client_works(tmp_path: Path):
    environment = {"PATH": os.environ["PATH"]}
    parameters = StdioServerParameters(command=SERVER[0], args=[*SERVER[1:], str(tmp_path)], cwd=REPO, env=environment)
    async with Client(parameters) as client:
        result = await client.call_tool("run_code", {"code": "1+1"})
        assert not result.is_error
    await assert_server_ends(tmp_path)
    assert machines(tmp_path) == []
