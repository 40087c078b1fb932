"""Tools that copy a sandbox, or put it aside for a while: the toolset `advanced`."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from pydantic import Field

from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.forks import MAX_COPIES
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import SandboxId, ToolContext, hints, owner_of, service_of, tool_errors
from mcp_sandbox.views import ForkedSandboxes, SandboxView


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add this family's tools."""
    own = settings.limits.owner_paused
    most_paused = settings.limits.paused if own is None else min(own, settings.limits.paused)

    @mcp.tool(
        title="Fork sandbox",
        description=(
            "Copy a sandbox as it is now, to try several ways from the same point. Each copy is a sandbox of its own "
            "with the same variables, running processes, open files and disk; nothing done in one is seen in another, "
            "and the original goes on. Host name, machine id and random generators of a copy are new, also generators "
            "that were seeded; its time to live begins anew. All copies are made, or none. Refused while a run is on."
        ),
        annotations=hints(read_only=False, destructive=False, idempotent=False),
    )
    async def fork_sandbox(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        count: Annotated[int, Field(ge=1, le=MAX_COPIES, description="How many copies.")] = 1,
    ) -> ForkedSandboxes:
        with tool_errors():
            return ForkedSandboxes(copies=await service_of(ctx).fork(owner_of(ctx), sandbox_id, count))

    @mcp.tool(
        title="Pause sandbox",
        description=(
            "Put a sandbox aside until resume_sandbox: it takes no CPU and no memory and leaves its place to others; "
            "code and files in it cannot be used. While paused it is not idle, but it still ends at the age that "
            f"create_sandbox gave it. At most {most_paused} paused at once. Refused while a run is on."
        ),
        annotations=hints(read_only=False, destructive=False, idempotent=True),
    )
    async def pause_sandbox(ctx: ToolContext, sandbox_id: SandboxId) -> SandboxView:
        with tool_errors():
            return await service_of(ctx).pause(owner_of(ctx), sandbox_id)

    @mcp.tool(
        title="Resume sandbox",
        description=(
            "Let a paused sandbox go on where it was: variables, processes, open files, disk and host name are the "
            "same, the clock is right. It needs a place among those that are alive; without one it stays paused."
        ),
        annotations=hints(read_only=False, destructive=False, idempotent=True),
    )
    async def resume_sandbox(ctx: ToolContext, sandbox_id: SandboxId) -> SandboxView:
        with tool_errors():
            return await service_of(ctx).resume(owner_of(ctx), sandbox_id)
