"""The tool that calls a handler as AWS Lambda does: toolset `handlers`."""

from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field, JsonValue

from mcp_sandbox.config import Settings
from mcp_sandbox.runs.requests import HandlerRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import SandboxId, ToolContext, hints, owner_of
from mcp_sandbox.tools.descriptions import may_be_online
from mcp_sandbox.tools.run_answers import result_of


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add this tool."""

    @mcp.tool(
        title="Invoke handler",
        description=(
            "Run Python code that defines an AWS-Lambda-style function handler(event, context), call it with a JSON "
            "event, and return its JSON result, its output, and the call's duration, CPU time and peak memory. "
            "An async handler is awaited. context has function_name, memory_limit_in_mb, aws_request_id, "
            "get_remaining_time_in_millis() and an attribute for every key of the argument context. "
            "With sandbox_id the handler stays defined: call it again with another event and empty code. "
            "Without it, the handler runs once in a one-off sandbox. Everything else works as in run_code."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=False, open_world=may_be_online(settings)),
        structured_output=False,
    )
    async def invoke_handler(
        ctx: ToolContext,
        code: Annotated[
            str,
            Field(
                description=(
                    "Source that defines the handler; empty to call one that an earlier run defined. With event and "
                    f"context at most {settings.runs.max_code_bytes:,} bytes."
                )
            ),
        ],
        event: Annotated[JsonValue, Field(description="Any JSON value: the handler's first argument.")],
        sandbox_id: SandboxId | None = None,
        context: Annotated[
            dict[str, Any] | None, Field(description="Attributes of the handler's second argument.")
        ] = None,
        handler: Annotated[str, Field(min_length=1, max_length=200, description="Name of the function.")] = "handler",
        timeout_s: Annotated[
            float | None,
            Field(
                gt=0,
                le=settings.runs.max_timeout_s,
                description=f"Time limit in seconds; default {settings.runs.timeout_s:g}.",
            ),
        ] = None,
    ) -> CallToolResult:
        request = HandlerRun(
            owner_of(ctx), code, sandbox_id, None, timeout_s, event=event, context=context, handler=handler
        )
        return await result_of(ctx, request, background=False)
