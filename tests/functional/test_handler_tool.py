"""invoke_handler as a client calls it, from a real server with a real machine."""

import re

import anyio
import pytest
from mcp.client import Client

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
        async with Client(server_parameters(toolset="advanced", pool_max=0)) as client:
            created = await data_of(client, "create_sandbox")

            async def invoke(code: str, **more: object) -> str:
                same = {"sandbox_id": created["sandbox_id"], "context": {"tenant": "acme"}}
                return text_of(await client.call_tool("invoke_handler", {**same, "code": code, **more}))

            first = await invoke(CODE, event={"megabytes": 1})
            assert first.startswith('result:\n{"call": 1, "total": 0, "limit": 512}\n\nstdout:\nfor acme\n\nhandler: ')
            second = await invoke("", event={"megabytes": 250})
            assert second.startswith('result:\n{"call": 2, ')
            measured = re.search(r"handler: ([\d,]+) ms, CPU ([\d,]+) ms, peak memory (\d+) MB", second)
            assert measured, second  # larger than any peak before it, so it is known exactly
            assert int(measured[3]) > 250
            failed = await invoke("", event={})
            assert "KeyError: 'megabytes'" in failed
            assert "Define it, def nobody(event, context)" in await invoke("", event=1, handler="nobody")
