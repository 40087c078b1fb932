"""The tool that runs shell commands."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field

from guest.places import WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.runs.requests import CommandRun, Variables
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import SandboxId, ToolContext, hints, owner_of
from mcp_sandbox.tools.descriptions import may_be_online, network_of
from mcp_sandbox.tools.run_answers import InBackground, KeepProcesses, OneOffTemplate, result_of, timeout_field


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add this tool."""

    @mcp.tool(
        title="Run command",
        description=(
            "Run a shell command (bash if the template has it, else sh) in an isolated sandbox and return "
            "stdout, stderr, the exit code and new artifacts. With sandbox_id, files persist, and the command starts "
            f"in the directory (at first {WORKSPACE}) and with the exported variables that the last command left. "
            "Without it, the command runs in a one-off sandbox and nothing is kept. Processes that it leaves running "
            "end with it, unless keep_processes is true; then their output comes with a later command's. Commands run "
            "beside each other and beside code: start a server with background=true. "
            f"Everything else works as in run_code. {network_of(settings)}"
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=False, open_world=may_be_online(settings)),
        structured_output=False,
    )
    async def run_command(
        ctx: ToolContext,
        command: Annotated[str, Field(description="A command line or a script.")],
        sandbox_id: SandboxId | None = None,
        template: OneOffTemplate = None,
        cwd: Annotated[
            str | None,
            Field(description="Directory of this command only."),
        ] = None,
        env: Annotated[
            Variables | None,
            Field(description="Environment variables of this command only."),
        ] = None,
        stdin: Annotated[str | None, Field(description="Standard input of the command.")] = None,
        timeout_s: Annotated[float | None, timeout_field(settings)] = None,
        background: InBackground = False,
        keep_processes: KeepProcesses = False,
    ) -> CallToolResult:
        request = CommandRun(
            owner_of(ctx),
            command,
            sandbox_id,
            template,
            timeout_s,
            keep_processes=keep_processes,
            cwd=cwd,
            env=env,
            stdin=stdin,
        )
        return await result_of(ctx, request, background=background)
