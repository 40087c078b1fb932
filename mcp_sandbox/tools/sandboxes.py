"""Tools that make, name and end sandboxes."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel, Field

from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.info import SandboxInfo
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


class SandboxView(BaseModel):
    """A sandbox, as its owner sees it."""

    sandbox_id: str = Field(description="Give this to the other tools.")
    template: str
    language: str
    isolation_in_force: str = Field(description="What stands between the code and the host, and what does not.")
    isolation: str = Field(description="vm: a kernel of its own; kernel: an application kernel; namespace: weakest.")
    driver: str
    accel: str | None = Field(description="kvm, or tcg: emulated and many times slower CPU; null: native.")
    memory_mb: int
    vcpus: int
    disk_mb: int
    network: str = "none"
    working_directory: str = WORKSPACE
    artifacts_directory: str = OUTPUTS
    state: str = Field(description="ready, running or paused")
    run_id: str | None = Field(description="The run that is on; read_output and stop_run take it.")
    age_s: float
    expires_in_s: float = Field(description="Seconds until it ends if it is not used.")
    ends_in_s: float = Field(description="Seconds until it ends in any case.")
    restore_ms: float = Field(description="How long it took to start.")
    missing_protections: list[str] = Field(description="Limits that are not in force on this host.")


class SandboxList(BaseModel):
    """The sandboxes that are alive."""

    sandboxes: list[SandboxView]
    max_sandboxes: int


class ClosedView(BaseModel):
    """What came of closing."""

    sandbox_id: str
    closed: bool = Field(description="false: it had ended before")


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add this family's tools."""
    names = "; ".join(f"{name}: {template.title}" for name, template in settings.catalogue.templates().items())

    @mcp.tool(
        title="Create sandbox",
        description=(
            "Create a sandbox: an isolated offline machine, ready in a moment. Files and, in Python, variables and "
            f"imports persist across calls that name its sandbox_id. {lifetime_of(settings)}; then all of it is gone. "
            f"At most {settings.limits.sandboxes} at once."
        ),
        annotations=hints(read_only=False, destructive=False, idempotent=False),
    )
    async def create_sandbox(
        ctx: ToolContext,
        template: Annotated[
            str,
            # Made once: a template that is added while the server runs can be named all the same.
            Field(
                min_length=1,
                max_length=63,
                description=f"What is in the sandbox, and its language. Known when the server started: {names}.",
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
            return view(await service_of(ctx).create(owner_of(ctx), template, ttl_s=ttl_s, idle_s=idle_s))

    @mcp.tool(
        title="List sandboxes",
        description="List the sandboxes that are alive.",
        annotations=hints(read_only=True, destructive=False, idempotent=True),
    )
    async def list_sandboxes(ctx: ToolContext) -> SandboxList:
        alive = service_of(ctx).sandboxes(owner_of(ctx))
        return SandboxList(sandboxes=[view(info) for info in alive], max_sandboxes=settings.limits.sandboxes)

    @mcp.tool(
        title="Close sandbox",
        description=(
            "Destroy a sandbox: stops what runs in it and deletes its variables, files and artifacts for good. "
            "Closing one that has ended already changes nothing."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=True),
    )
    async def close_sandbox(ctx: ToolContext, sandbox_id: SandboxId) -> ClosedView:
        with tool_errors():
            closed = await service_of(ctx).close(owner_of(ctx), sandbox_id)
        return ClosedView(sandbox_id=sandbox_id, closed=closed)


def view(info: SandboxInfo) -> SandboxView:
    """What tools tell of a sandbox."""
    size = info.template.machine
    return SandboxView(
        sandbox_id=info.id,
        template=info.template.name,
        language=info.template.language,
        isolation_in_force=str(info.facts),
        isolation=info.facts.isolation,
        driver=info.facts.driver,
        accel=info.facts.accel,
        memory_mb=size.memory_mb,
        vcpus=size.vcpus,
        disk_mb=size.disk_mb,
        state=info.state,
        run_id=info.run_id,
        age_s=round(info.age_s, 1),
        expires_in_s=round(info.expires_in_s, 1),
        ends_in_s=round(info.ends_in_s, 1),
        restore_ms=round(1000 * info.timings.restore_s, 1),
        missing_protections=list(info.facts.limits),
    )
