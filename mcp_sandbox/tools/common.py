"""What all tools share: the caller, errors, and descriptions of common arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from mcp_sandbox.accounts.owners import current_owner
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.sandboxes.run_calls import Report
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.next_steps import NEXT_STEPS
from mcp_sandbox.views import with_next_step

ToolContext = Context[SandboxService, Any]

SandboxId = Annotated[str, Field(min_length=1, max_length=64, description="Id from create_sandbox.")]
RunId = Annotated[str, Field(min_length=1, max_length=64, description="Id from run_code or run_command.")]

ListOffset = Annotated[int, Field(ge=0, lt=2**31, description="next_offset of the page before.")]


def service_of(ctx: ToolContext) -> SandboxService:
    """Return the service behind this server."""
    return ctx.request_context.lifespan_context


def owner_of(_ctx: ToolContext) -> str:
    """Return the owner of the sandboxes this request may use."""
    return current_owner()


def reporter(ctx: ToolContext) -> Report | None:
    """Return a function that reports a run's age and its latest line to a client that asked for progress.

    The total is unknown.
    """
    if "progress_token" not in (ctx.request_context.meta or {}):
        return None

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


def hints(*, read_only: bool, destructive: bool, idempotent: bool, open_world: bool = False) -> ToolAnnotations:
    """Return a tool's annotations. Only the web tools, and code that the operator allows to, reach an open world.

    What the protocol assumes anyway is left out: clients count the tokens.
    """
    if read_only:  # the next two have no meaning then
        return ToolAnnotations(read_only_hint=True, open_world_hint=open_world)
    return ToolAnnotations(
        destructive_hint=destructive, idempotent_hint=True if idempotent else None, open_world_hint=open_world
    )
