"""invoke_handler as a client calls it, from a real server with a real machine."""

import anyio
import pytest
from mcp.client import Client
from mcp_types import CallToolResult

from guest.client.reports import HandlerReport
from mcp_sandbox.commands.common import run_of
from mcp_sandbox.machines.provider import HostFacts
from tests.functional.mcp_client import data_of, server_parameters, text_of
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

CODE = """
calls = 0
def handler(event, context):
    global calls
    calls += 1
    print("for", context.tenant)
    return {"call": calls, "total": sum(bytearray(event["megabytes"] * 2**20)), "limit": context.memory_limit_in_mb}
"""


async def test_a_client_calls_a_handler_again_with_another_event(in_force: HostFacts):
    with anyio.fail_after(HANG_S):
        async with Client(server_parameters(toolsets="advanced", pool_max=0)) as client:
            created = await data_of(client, "create_sandbox")

            async def call(code: str, **more: object) -> CallToolResult:
                same = {"sandbox_id": created["sandbox_id"], "context": {"tenant": "acme"}}
                return await client.call_tool("invoke_handler", {**same, "code": code, **more})

            async def invoke(code: str, **more: object) -> str:
                return text_of(await call(code, **more))

            first = await invoke(CODE, event={"megabytes": 1})
            assert first.startswith('result:\n{"call": 1, "total": 0, "limit": 1024}\n\nstdout:\nfor acme\n\nhandler: ')
            second = run_of(await call("", event={"megabytes": 250})).report
            assert isinstance(second, HandlerReport)
            assert second.result is not None
            assert second.result.startswith('{"call": 2, ')
            assert second.end.peak_bytes == second.least_peak_bytes  # larger than any peak before it: known exactly
            assert second.least_peak_bytes > 250 * 2**20
            failed = await invoke("", event={})
            assert "KeyError: 'megabytes'" in failed
            assert "Define it with `def nobody(event, context)`" in await invoke("", event=1, handler="nobody")
