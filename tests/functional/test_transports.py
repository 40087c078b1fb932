"""Progress and cancellation with the SDK's client: on stdio, over HTTP, and from one to the other, in both eras."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

from tests.functional.checkout import REPO
from tests.functional.http_fake import serving_fakes
from tests.functional.mcp_client import call, connect_parameters, data_of, text_of
from tests.functional.stdio_fake import TRAINING, plan_training
from tests.unit.fakes import FakeProvider
from tests.waiting import HANG_S


@asynccontextmanager
async def connected(transport: str, mode: str, directory: Path) -> AsyncIterator[Client]:
    if transport == "stdio":
        argv = ["-m", "tests.functional.stdio_fake", str(directory)]
        server = StdioServerParameters(command=sys.executable, args=argv, cwd=REPO, env=dict(os.environ))
        async with Client(server, mode=mode) as client:
            yield client
    else:
        provider = FakeProvider()
        plan_training(provider)
        reach = connect_parameters if transport == "connect" else str
        async with serving_fakes(provider) as address, Client(reach(address), mode=mode) as client:
            yield client


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
@pytest.mark.parametrize("transport", ["stdio", "http", "connect"])
async def test_a_call_reports_progress_and_can_be_cancelled(transport: str, mode: str, tmp_path: Path):
    heard: list[str | None] = []
    with anyio.fail_after(HANG_S):
        async with connected(transport, mode, tmp_path) as client:
            sandbox_id = (await data_of(client, "create_sandbox"))["sandbox_id"]
            async with anyio.create_task_group() as tasks:

                async def hear(progress: float, total: float | None, message: str | None) -> None:
                    heard.append(message)
                    tasks.cancel_scope.cancel()

                training = {"code": TRAINING, "sandbox_id": sandbox_id, "timeout_s": 600}
                await client.call_tool("run_code", training, progress_callback=hear)
            assert heard == ["epoch 1"]
            # It would wait for a run that goes on.
            assert "[ok" in text_of(await call(client, "run_code", code="1", sandbox_id=sandbox_id))
