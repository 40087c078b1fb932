"""Tools that create, list and close sandboxes."""

from collections.abc import Mapping
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from pydantic import Field

from mcp_sandbox.config import Settings
from mcp_sandbox.machines.web import TEMPLATE as WEB_TEMPLATE
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.sandboxes.sizes import LEAST_MEMORY_MB
from mcp_sandbox.sandboxes.view import contents_of
from mcp_sandbox.tools.common import ListOffset, SandboxId, ToolContext, hints, owner_of, service_of, tool_errors
from mcp_sandbox.tools.content import fitting
from mcp_sandbox.tools.descriptions import domains_of, lifetime_of
from mcp_sandbox.views import ClosedSandbox, SandboxList, SandboxView
from templates.model import Template
from vmm.types import NetworkMode

MAX_DOMAINS = 100  # that a sandbox can ask for
Domain = Annotated[str, Field(min_length=1, max_length=253)]
MAX_TEMPLATES_CHARS = 4000  # of the templates in the description of create_sandbox


def register(mcp: MCPServer[SandboxService], settings: Settings, isolation: str) -> None:
    """Add these tools."""
    names = _described(settings.catalogue.templates())

    @mcp.tool(
        title="Create sandbox",
        description=(
            "Create a sandbox: a machine, offline by default. Files and, in Python, variables and imports "
            f"persist across calls that name its sandbox_id. {lifetime_of(settings)}; then everything in it is gone. "
            f"At most {settings.limits.sandboxes} exist at once. Isolation: {isolation}."
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
                description=f"What the sandbox contains: {names}.",
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
        memory_mb: Annotated[
            int | None,
            Field(ge=LEAST_MEMORY_MB, le=settings.limits.sandbox_memory_mb, description="Default: the template's."),
        ] = None,
        cpus: Annotated[int | None, Field(ge=1, description="Default: the template's.")] = None,
        network: Annotated[NetworkMode, Field(description=_modes(settings))] = NetworkMode.NONE,
        allow_domains: Annotated[
            list[Domain] | None,
            Field(
                min_length=1,
                max_length=MAX_DOMAINS,
                description="With proxy: only these, such as pypi.org or *.example.com.",
            ),
        ] = None,
    ) -> SandboxView:
        with tool_errors():
            return await service_of(ctx).create(
                owner_of(ctx),
                template,
                ttl_s=ttl_s,
                idle_s=idle_s,
                memory_mb=memory_mb,
                cpus=cpus,
                network=network,
                allow_domains=allow_domains,
            )

    @mcp.tool(
        title="List sandboxes",
        description="List the live sandboxes.",
        annotations=hints(read_only=True, destructive=False, idempotent=True),
    )
    async def list_sandboxes(ctx: ToolContext, offset: ListOffset = 0) -> SandboxList:
        return service_of(ctx).list_sandboxes(owner_of(ctx), offset=offset)

    @mcp.tool(
        title="Close sandbox",
        description=(
            "Destroy a sandbox: stop its runs and delete its variables, files and artifacts for good. "
            "Closing it again changes nothing."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=True),
    )
    async def close_sandbox(ctx: ToolContext, sandbox_id: SandboxId) -> ClosedSandbox:
        with tool_errors():
            closed = await service_of(ctx).close(owner_of(ctx), sandbox_id)
        return ClosedSandbox(sandbox_id=sandbox_id, closed=closed)


def _modes(settings: Settings) -> str:
    """Describe the network modes, and which of them the operator has enabled."""
    proxy = f"http and https to {domains_of(settings)}" if settings.network.enabled else "not enabled here"
    nat = "a network device" if settings.allow_nat else "not enabled here"
    return f"none: offline; proxy: {proxy}; nat: {nat}."


def _described(templates: Mapping[str, Template]) -> str:
    """Return the first templates with what they have, as many as a description has room for."""
    lines = [
        f"{name}: {contents_of(template)} ({template.machine.memory_mb} MB)"
        for name, template in templates.items()
        if name != WEB_TEMPLATE  # no sandbox for code
    ]
    shown = fitting(lines, MAX_TEMPLATES_CHARS)
    more = f"; and {len(lines) - len(shown)} more, which `mcp-sandbox template list` shows" * (len(shown) < len(lines))
    return "; ".join(shown) + more
