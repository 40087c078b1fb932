"""Tools that create, list and close sandboxes."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from pydantic import Field

from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import (
    SandboxId,
    ToolContext,
    hints,
    lifetime_of,
    owner_of,
    service_of,
    tool_errors,
)
from mcp_sandbox.views import ClosedSandbox, SandboxList, SandboxView


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add these tools."""
    names = "; ".join(f"{name}: {template.title}" for name, template in settings.catalogue.templates().items())

    @mcp.tool(
        title="Create sandbox",
        description=(
            "Create a sandbox: an isolated, offline machine. Files and, in Python, variables and imports persist "
            f"across calls that name its sandbox_id. {lifetime_of(settings)}; then everything in it is gone. "
            f"At most {settings.limits.sandboxes} exist at once."
        ),
        annotations=hints(read_only=False, destructive=False, idempotent=False),
    )
    async def create_sandbox(
        ctx: ToolContext,
        template: Annotated[
            str,
            # The description is made once, but templates added later can be named too.
            Field(
                min_length=1,
                max_length=63,
                description=f"What the sandbox contains, and its language: {names}.",
            ),
        ] = settings.template,
        ttl_s: Annotated[
            float,
            Field(gt=0, le=settings.lifetime.max_age_s, description="Seconds after which it ends in any case."),
        ] = settings.lifetime.max_age_s,
        idle_s: Annotated[
            float,
            Field(gt=0, le=settings.lifetime.max_idle_s, description="Seconds without use after which it ends."),
        ] = settings.lifetime.idle_s,
    ) -> SandboxView:
        with tool_errors():
            return await service_of(ctx).create(owner_of(ctx), template, ttl_s=ttl_s, idle_s=idle_s)

    @mcp.tool(
        title="List sandboxes",
        description="List the live sandboxes.",
        annotations=hints(read_only=True, destructive=False, idempotent=True),
    )
    async def list_sandboxes(ctx: ToolContext) -> SandboxList:
        alive = service_of(ctx).sandboxes(owner_of(ctx))
        return SandboxList(sandboxes=alive, max_sandboxes=settings.limits.sandboxes)

    @mcp.tool(
        title="Close sandbox",
        description=(
            "Destroy a sandbox: stop its run and delete its variables, files and artifacts for good. "
            "Closing a sandbox that has already ended changes nothing."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=True),
    )
    async def close_sandbox(ctx: ToolContext, sandbox_id: SandboxId) -> ClosedSandbox:
        with tool_errors():
            closed = await service_of(ctx).close(owner_of(ctx), sandbox_id)
        return ClosedSandbox(sandbox_id=sandbox_id, closed=closed)
