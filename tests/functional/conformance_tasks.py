"""What the conformance suite expects of the tasks extension: tools that become tasks, over runs in memory."""

import asyncio
from typing import Any

import anyio
from mcp.server.mcpserver import Context
from mcp_types import CallToolResult

from guest.client.messages import Output
from mcp_sandbox.accounts.owners import current_owner
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.serving.server import SandboxServer
from mcp_sandbox.tools.run_answers import result_of
from tests.unit.fakes import FakeProvider, finished

AnyContext = Context[Any, Any]


def register(server: SandboxServer, provider: FakeProvider) -> None:
    """Add these tools."""

    @server.tool(structured_output=False)
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    @server.tool(structured_output=False)
    async def slow_compute(ctx: AnyContext, seconds: float, label: str = "") -> CallToolResult:
        over = anyio.Event()
        asyncio.get_running_loop().call_later(seconds, over.set)
        code = f"{label} {seconds}"
        provider.plans[code] = [over, Output("stdout", "computed\n"), finished()]
        return await result_of(ctx, CodeRun(current_owner(), code), background=True)

    @server.tool(structured_output=False)
    async def failing_job(ctx: AnyContext) -> CallToolResult:
        return await result_of(ctx, CodeRun(current_owner(), "die"), background=True)
