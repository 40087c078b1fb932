"""Tools that fork, pause and resume a sandbox: toolset `forks`."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from pydantic import Field

from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.forks import MAX_COPIES
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import SandboxId, ToolContext, hints, owner_of, service_of, tool_errors
from mcp_sandbox.views import ForkedSandboxes, SandboxView
from mcp_sandbox.views.sandboxes import Reseed


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add these tools."""
    own = settings.limits.owner_paused
    most_paused = settings.limits.paused if own is None else min(own, settings.limits.paused)

    @mcp.tool(
        title="Fork sandbox",
        description=(
            "Copy a sandbox as it is now, to try alternatives from the same state. Each copy is an independent sandbox "
            "with the same variables, running processes, open files and disk; the original continues. A copy gets a "
            "new host name and machine id, and a new time to live. random and numpy.random are reseeded; generators "
            "that code has made (numpy.random.default_rng(3)) continue equally in all copies, unless reseed is all. "
            "Either all copies are made or none. Refused while a run is active."
        ),
        annotations=hints(read_only=False, destructive=False, idempotent=False),
    )
    async def fork_sandbox(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        count: Annotated[int, Field(ge=1, le=MAX_COPIES, description="How many copies.")] = 1,
        reseed: Annotated[
            Reseed, Field(description="Generators to reseed: those of modules, or all that can be found.")
        ] = "global",
    ) -> ForkedSandboxes:
        with tool_errors():
            return ForkedSandboxes(copies=await service_of(ctx).fork(owner_of(ctx), sandbox_id, count, reseed))

    @mcp.tool(
        title="Pause sandbox",
        description=(
            "Save a sandbox to disk until resume_sandbox: it uses no CPU or memory and does not count as live; its "
            "code and files are unavailable. The idle timeout stops, but it still ends at its maximum age. "
            f"At most {most_paused} can be paused at once. Refused while a run is active."
        ),
        annotations=hints(read_only=False, destructive=False, idempotent=True),
    )
    async def pause_sandbox(ctx: ToolContext, sandbox_id: SandboxId) -> SandboxView:
        with tool_errors():
            return await service_of(ctx).pause(owner_of(ctx), sandbox_id)

    @mcp.tool(
        title="Resume sandbox",
        description=(
            "Continue a paused sandbox where it was: variables, processes, open files, disk and host name are "
            "unchanged, and the clock is correct. If the limits have no room for it, it stays paused."
        ),
        annotations=hints(read_only=False, destructive=False, idempotent=True),
    )
    async def resume_sandbox(ctx: ToolContext, sandbox_id: SandboxId) -> SandboxView:
        with tool_errors():
            return await service_of(ctx).resume(owner_of(ctx), sandbox_id)
