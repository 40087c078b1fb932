"""`mcp-sandbox serve` as its users meet it: real clients of both eras over HTTP, tokens, and how it stops."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import psutil
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from mcp_sandbox.accounts.tokens import Tokens
from mcp_sandbox.config import load_settings
from tests.functional.checkout import REPO
from tests.functional.mcp_client import SERVER, call, data_of, error_of, server_environment, text_of
from tests.waiting import HANG_S, assert_soon_empty, promised

pytestmark = pytest.mark.vm


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[tuple[Process, str]]:
    """A server on a free port of this host, without a terminal, and its address."""
    environment = server_environment(pool_max=0, **settings)
    command = [sys.executable, *SERVER, "serve", "--port", "0"]
    async with await anyio.open_process(command, cwd=REPO, env=environment, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            with anyio.fail_after(HANG_S):
                async for text in TextReceiveStream(process.stderr):
                    if "serving " in text:
                        address = text.partition("serving ")[2].partition(",")[0]
                        break
            yield process, address
        finally:
            if process.returncode is None:
                process.terminate()


@asynccontextmanager
async def client_of(address: str, token: str | None = None, mode: str = "auto") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=HANG_S) as http,
        Client(streamable_http_client(address, http_client=http), mode=mode) as client,
    ):
        yield client


@pytest.fixture
def tokens():
    opened = Tokens(load_settings().home)
    yield opened
    for token in opened.all():
        opened.revoke(token.name)
    opened.close()


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_clients_of_both_eras_run_code_over_http(mode: str):
    async with serving() as (_, address), client_of(address, mode=mode) as client:
        sandbox_id = (await data_of(client, "create_sandbox"))["sandbox_id"]
        await call(client, "run_code", sandbox_id=sandbox_id, code="x = 20")
        assert "42" in text_of(await call(client, "run_code", sandbox_id=sandbox_id, code="print(2 * x + 2)"))


async def test_a_sandbox_outlives_the_connection_that_created_it():
    async with serving() as (_, address):
        async with client_of(address) as client:
            sandbox_id = (await data_of(client, "create_sandbox"))["sandbox_id"]
        async with client_of(address) as client:
            assert "1" in text_of(await call(client, "run_code", sandbox_id=sandbox_id, code="print(1)"))


async def test_another_owners_sandbox_answers_like_an_unknown_one(tokens: Tokens):
    ana, bob = tokens.create("ana"), tokens.create("bob")
    async with serving() as (_, address), client_of(address, ana) as hers, client_of(address, bob) as his:
        sandbox_id = (await data_of(hers, "create_sandbox"))["sandbox_id"]
        unknown = sandbox_id[:-4] + "zzzz"
        for tool, more in (("run_code", {"code": "1"}), ("list_files", {}), ("close_sandbox", {})):
            strange = error_of(await his.call_tool(tool, {"sandbox_id": sandbox_id, **more}))
            none = error_of(await his.call_tool(tool, {"sandbox_id": unknown, **more}))
            assert strange.replace(sandbox_id, "ID") == none.replace(unknown, "ID")
        assert (await data_of(his, "list_sandboxes"))["sandboxes"] == []
        assert len((await data_of(hers, "list_sandboxes"))["sandboxes"]) == 1


async def test_a_stopped_server_lets_an_active_run_end_and_leaves_nothing():
    async with serving(serve_drain_s=HANG_S) as (process, address), client_of(address) as client:
        sandbox_id = (await data_of(client, "create_sandbox"))["sandbox_id"]
        machines = psutil.Process(process.pid).children(recursive=True)
        assert machines
        answers: list[str] = []
        code = "open('started', 'w').close()\nimport time\ntime.sleep(3)\nprint('done')"

        async def run() -> None:
            answers.append(text_of(await call(client, "run_code", sandbox_id=sandbox_id, code=code, timeout_s=100)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while "started" not in text_of(await call(client, "list_files", sandbox_id=sandbox_id)):
                pass
            process.send_signal(signal.SIGTERM)
        assert "done" in answers[0]
        assert await process.wait() == 0
    await assert_soon_empty(lambda: [machine for machine in machines if machine.is_running()], promised())
