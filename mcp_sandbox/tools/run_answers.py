"""What all tools that start a run share: their arguments and their answer."""

from typing import Annotated, Any

from mcp_types import CallToolResult
from pydantic import Field

from mcp_sandbox.config import Settings
from mcp_sandbox.runs.requests import RunRequest
from mcp_sandbox.tools.common import ToolContext, reporter, service_of, tool_errors
from mcp_sandbox.tools.run_text import progress_blocks, run_blocks
from mcp_sandbox.views import RUN_META, RunProgress, RunView

OneOffTemplate = Annotated[
    str | None,
    Field(max_length=63, description="Without sandbox_id: template of the one-off sandbox."),
]
InBackground = Annotated[
    bool,
    Field(description="Return a run_id at once instead of waiting. A one-off sandbox is then kept."),
]

KeepProcesses = Annotated[
    bool,
    Field(description="Leave processes running that it started in the background, such as a server."),
]


def timeout_field(settings: Settings) -> Any:  # noqa: ANN401 - pydantic's own type
    """Return the field of a time limit argument."""
    return Field(
        gt=0,
        le=settings.runs.max_timeout_s,
        description=(
            f"Time limit in seconds; default {settings.runs.timeout_s:g}, in the background "
            f"{settings.runs.max_timeout_s:g}."
        ),
    )


def answer(outcome: RunView | RunProgress) -> CallToolResult:
    """Return the text and images of a run for the model, and the whole view for programs.

    The view is in `_meta`, not in `structuredContent`: several clients show the model nothing but the latter.
    """
    blocks = run_blocks(outcome) if isinstance(outcome, RunView) else progress_blocks(outcome)
    view = outcome.model_dump(mode="json", exclude={"images": True, "result": {"images"}})
    return CallToolResult(content=blocks, _meta={RUN_META: view})


async def result_of(ctx: ToolContext, request: RunRequest, *, background: bool) -> CallToolResult:
    """Carry out a run; answer with its result, or with its progress if it takes too long."""
    with tool_errors():
        outcome = await service_of(ctx).run_for_client(request, background=background, report=reporter(ctx))
    return answer(outcome)
