"""Forks, pauses and resumes as a client asks for them, with the whole server in between."""

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import CallToolResult, TextContent

from mcp_sandbox.app import Host
from templates.build import BuiltTemplate
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

ROOT = Path(__file__).parents[2]


def text_of(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def test_a_client_tries_two_ways_from_one_point_and_goes_on_after_a_pause(host: Host, built: BuiltTemplate):
    if not host.driver.capabilities.snapshot:
        pytest.skip(f"{host.driver.name} takes no snapshots")
    environment = {**os.environ, "MCP_SANDBOX_DRIVER": host.driver.name, "MCP_SANDBOX_TOOLSET": "advanced"}
    server = StdioServerParameters(command=sys.executable, args=["-m", "mcp_sandbox"], cwd=ROOT, env=environment)
    with anyio.fail_after(HANG_S):
        async with Client(server) as client:

            async def call(tool: str, **arguments: object) -> CallToolResult:
                result = await client.call_tool(tool, arguments)
                assert not result.is_error, text_of(result)
                return result

            async def asked(tool: str, **arguments: object) -> Any:
                answer = (await call(tool, **arguments)).structured_content
                assert answer is not None
                return answer

            async def shown(box: str, code: str) -> str:
                return text_of(await call("run_code", code=code, sandbox_id=box))

            box = (await asked("create_sandbox"))["sandbox_id"]
            await shown(box, "import pandas\ntable = pandas.DataFrame({'n': range(10)})")
            copies = [view["sandbox_id"] for view in (await asked("fork_sandbox", sandbox_id=box, count=2))["copies"]]
            for number, copy in enumerate(copies, start=2):
                assert f"stdout:\n{45 * number}\n" in await shown(copy, f"table.n *= {number}; print(table.n.sum())")
            assert (await asked("pause_sandbox", sandbox_id=box))["state"] == "paused"
            refused = await client.call_tool("run_code", {"code": "1", "sandbox_id": box})
            assert refused.is_error
            assert f'resume_sandbox(sandbox_id="{box}")' in text_of(refused)
            assert (await asked("resume_sandbox", sandbox_id=box))["state"] == "ready"
            assert "stdout:\n45\n" in await shown(box, "print(table.n.sum())")
            alive = {view["sandbox_id"] for view in (await asked("list_sandboxes"))["sandboxes"]}
            assert alive == {box, *copies}
    assert not [path for path in host.settings.run_dir.iterdir() if not path.is_socket()]
