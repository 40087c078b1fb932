"""What all tools share: who is calling, how errors are told, how arguments are described."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.sandboxes.run_calls import Report
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.next_steps import NEXT_STEPS
from mcp_sandbox.views import with_next_step

LOCAL_OWNER = "local"  # on stdio there is one client, and all sandboxes of the process are its own

# Without this models try, and read the same from a sandbox.
NOTHING_TO_INSTALL = "There is no network, so no package can be installed: it has to be in the template."

ToolContext = Context[SandboxService, Any]

SandboxId = Annotated[
    str, Field(min_length=1, max_length=64, description="Id of a sandbox, as create_sandbox returned it.")
]
RunId = Annotated[
    str, Field(min_length=1, max_length=64, description="Id of a run, as run_code or run_command returned it.")
]


def service_of(ctx: ToolContext) -> SandboxService:
    """The service behind this server."""
    return ctx.request_context.lifespan_context


def owner_of(ctx: ToolContext) -> str:  # noqa: ARG001 - over HTTP the request will tell
    """Whose sandboxes this request may touch."""
    return LOCAL_OWNER


def reporter(ctx: ToolContext) -> Report:
    """Tells the client how old a run is and what it wrote last. Nobody knows a total."""

    async def report(elapsed_s: float, line: str) -> None:
        await ctx.report_progress(elapsed_s, None, line)

    return report


@contextmanager
def tool_errors() -> Iterator[None]:
    """Tell the model what went wrong and what to do next. Any other exception is a bug and stays in the log."""
    try:
        yield
    except SandboxError as error:
        raise ToolError(with_next_step(error, NEXT_STEPS)) from error


def hints(*, read_only: bool, destructive: bool, idempotent: bool) -> ToolAnnotations:
    """All annotations a tool can have. Sandboxes have no network, so no tool reaches an open world."""
    return ToolAnnotations(
        read_only_hint=read_only,
        destructive_hint=destructive,
        idempotent_hint=idempotent,
        open_world_hint=False,
    )


def lifetime_of(settings: Settings) -> str:
    """How long a sandbox lives, for tool descriptions."""
    return (
        f"A sandbox lives until close_sandbox, {span(settings.lifetime.idle_s)} without use, "
        f"{span(settings.lifetime.max_age_s)} in all, or the end of this server process, whichever comes first"
    )


def span(seconds: float) -> str:
    """A length of time as people say it."""
    for unit_s, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds:g} seconds"
