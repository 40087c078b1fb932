"""The tool that runs shell commands."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field

from guest.places import WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.runs.commands import command_options
from mcp_sandbox.runs.results import RunRequest
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import NOTHING_TO_INSTALL, SandboxId, ToolContext, hints, owner_of, tool_errors
from mcp_sandbox.tools.running import InBackground, OneOffTemplate, result_of, timeout_field


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add this family's tools."""

    @mcp.tool(
        title="Run command",
        description=(
            "Run a shell command (bash where the template has it, else sh) in an isolated, offline sandbox and return "
            "stdout, stderr, the exit code and new artifacts. With sandbox_id: files of earlier runs are there, and "
            f"the command starts in the directory (at first {WORKSPACE}) and with the exported variables that the last "
            "command ended with. Without: it runs once in a fresh sandbox and nothing is kept. "
            "Processes started with & go on when the command has ended, and what they write comes with the next "
            "command's output. Time limits, long output, long runs and artifacts are as with run_code. "
            f"{NOTHING_TO_INSTALL}"
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=False),
        structured_output=False,
    )
    async def run_command(
        ctx: ToolContext,
        command: Annotated[str, Field(description="One line or a whole script for the shell.")],
        sandbox_id: SandboxId | None = None,
        template: OneOffTemplate = None,
        cwd: Annotated[
            str | None,
            Field(description="Where this command starts; the directory of the next ones stays what it was."),
        ] = None,
        env: Annotated[
            dict[str, str] | None,
            Field(description="Variables for this command only."),
        ] = None,
        stdin: Annotated[str | None, Field(description="What the command reads from standard input.")] = None,
        timeout_s: Annotated[float | None, timeout_field(settings)] = None,
        background: InBackground = False,
    ) -> CallToolResult:
        with tool_errors():
            options = command_options(cwd, env, stdin)
        request = RunRequest(owner_of(ctx), command, sandbox_id, template, timeout_s, "command", options)
        return await result_of(ctx, request, background=background)
