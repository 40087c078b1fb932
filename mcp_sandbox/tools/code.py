"""The tool that runs code."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field

from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.runs import RunRequest
from mcp_sandbox.service import SandboxService
from mcp_sandbox.tools.common import (
    SandboxId,
    ToolContext,
    hints,
    lifetime_of,
    owner_of,
    service_of,
    told_to_the_model,
)
from mcp_sandbox.tools.results import run_blocks


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add this family's tools."""
    shown = settings.output_head_bytes + settings.output_tail_bytes

    @mcp.tool(
        title="Run code",
        description=(
            "Run Python code in an isolated, offline sandbox and return stdout, stderr, the value of the last "
            "expression, the traceback if it failed, new artifacts, and the first pictures as images. "
            "With sandbox_id: variables, imports and files of earlier runs are there, and what this run leaves stays. "
            f"{lifetime_of(settings)}. Without sandbox_id: the code runs once in a fresh sandbox and nothing is kept. "
            f"Working directory {WORKSPACE}; every file put in {OUTPUTS} is an artifact, and matplotlib figures land "
            f"there by themselves. A run over its time limit is interrupted (variables are kept), or killed if it does "
            f"not react (variables are lost, files kept). Of longer output the first and last parts, {shown:,} bytes a "
            "stream, are shown, and a file in the sandbox keeps as much as fits. "
            "There is no network: pip install does not work."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=False),
        structured_output=False,
    )
    async def run_code(
        ctx: ToolContext,
        code: Annotated[str, Field(description=f"Source code, at most {settings.max_code_bytes:,} bytes.")],
        sandbox_id: SandboxId | None = None,
        template: Annotated[
            str | None,
            Field(max_length=63, description="For a run without sandbox_id: what its sandbox is made from."),
        ] = None,
        timeout_s: Annotated[
            float,
            Field(gt=0, le=settings.max_run_timeout_s, description="Seconds after which the run is stopped."),
        ] = settings.run_timeout_s,
    ) -> CallToolResult:
        request = RunRequest(owner_of(ctx), code, sandbox_id, template, timeout_s)
        with told_to_the_model():
            result = await service_of(ctx).run(request)
        return CallToolResult(content=run_blocks(result))
