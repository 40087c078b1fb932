"""The tools that run code, and those for runs that take longer than a call."""

from typing import Annotated, Literal

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import BaseModel, ConfigDict, Field

from guest.client.reports import MAX_CASES
from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.runs.options import MIN_MEMORY_MB
from mcp_sandbox.runs.results import RunRequest
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import (
    NOTHING_TO_INSTALL,
    RunId,
    SandboxId,
    ToolContext,
    hints,
    owner_of,
    reporter,
    service_of,
    tool_errors,
)
from mcp_sandbox.tools.running import InBackground, OneOffTemplate, answer, result_of, timeout_field

WAIT_S = 10.0  # read_output's own idea of waiting: few calls, and none that seems to hang


class Case(BaseModel):
    """One run of a program."""

    model_config = ConfigDict(extra="forbid")

    stdin: str = ""
    expected: str | None = Field(
        default=None, description="What it should write; white space at the ends of lines does not count."
    )


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add this family's tools."""
    _register_run_code(mcp, settings)
    _register_read_output(mcp, settings)
    _register_stop_run(mcp)


def _register_run_code(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    shown = settings.output.head_bytes + settings.output.tail_bytes

    @mcp.tool(
        title="Run code",
        description=(
            "Run code in an isolated, offline sandbox, in the language of its template: Python, C++, Go or shell. "
            "Returns stdout, stderr, new artifacts, and the first pictures as images; for Python the value of the last "
            "expression and the traceback, for C++ and Go what the compiler said, times, peak memory, and a verdict on "
            "each test case. "
            "With sandbox_id: files and, in Python, variables and imports of earlier runs are there, and what this run "
            "leaves stays. Without: the code runs once in a fresh sandbox and nothing is kept. "
            f"Working directory {WORKSPACE}; every file put in {OUTPUTS} is an artifact, and matplotlib figures land "
            "there by themselves. A run over its time limit is interrupted (Python keeps its variables), or killed if "
            f"it does not react (they are lost, files kept). Of longer output the first and last parts, {shown:,} "
            "bytes a stream, are shown, and the result says how to read the rest. "
            f"A run that is still on after {settings.runs.foreground_s:g} s goes on in the background: the result has "
            f"its run_id for read_output and stop_run. {NOTHING_TO_INSTALL}"
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=False),
        structured_output=False,
    )
    async def run_code(
        ctx: ToolContext,
        code: Annotated[str, Field(description=f"Source code, at most {settings.runs.max_code_bytes:,} bytes.")],
        sandbox_id: SandboxId | None = None,
        template: OneOffTemplate = None,
        timeout_s: Annotated[float | None, timeout_field(settings)] = None,
        background: InBackground = False,
        stdin: Annotated[str | None, Field(description="What the code reads from standard input.")] = None,
        cases: Annotated[
            list[Case] | None,
            Field(
                min_length=1,
                max_length=MAX_CASES,
                description="C++, Go: test cases. Compiled once, run and judged one by one.",
            ),
        ] = None,
        case_timeout_s: Annotated[
            float | None,
            Field(gt=0, le=settings.runs.max_timeout_s, description="Seconds for each case: 10 if not given."),
        ] = None,
        memory_limit_mb: Annotated[
            int | None, Field(ge=MIN_MEMORY_MB, description="C++, Go: most memory of the program.")
        ] = None,
        flags: Annotated[
            list[str] | None,
            Field(description="C++: instead of -O2 -std=c++20. Go: for go build."),
        ] = None,
        sanitize: Annotated[
            list[Literal["address", "undefined", "thread"]] | None, Field(description="C++: sanitizers.")
        ] = None,
    ) -> CallToolResult:
        options = _given(
            stdin=stdin,
            cases=None if cases is None else [case.model_dump(exclude_none=True) for case in cases],
            case_timeout_s=case_timeout_s,
            memory_limit_mb=memory_limit_mb,
            flags=flags,
            sanitize=sanitize,
        )
        request = RunRequest(owner_of(ctx), code, sandbox_id, template, timeout_s, options=options)
        return await result_of(ctx, request, background=background)


def _given(**options: object) -> dict[str, object] | None:
    """What was asked for besides the code. Most often nothing, and that is the quickest."""
    return {name: value for name, value in options.items() if value is not None} or None


def _register_read_output(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    @mcp.tool(
        title="Read output",
        description=(
            "Read what a background run has written, while it runs and after: stdout and stderr in the order in which "
            f"they came, up to {settings.output.page_bytes:,} bytes from byte offset of that text; notes in it say "
            "where bytes are missing. The last line says whether it is running and where to go on reading; when the "
            "run is over and everything was read, its values, traceback, artifacts and pictures follow. "
            f"Results are kept while the sandbox lives, the last {settings.runs.kept} of them."
        ),
        annotations=hints(read_only=True, destructive=False, idempotent=True),
        structured_output=False,
    )
    async def read_output(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        run_id: RunId,
        offset: Annotated[int, Field(ge=0, description="Byte of the output to start at.")] = 0,
        wait_s: Annotated[
            float,
            Field(
                ge=0,
                le=settings.runs.foreground_s,
                description="Most seconds to wait for the end of the run, or for as much output as one answer holds.",
            ),
        ] = min(WAIT_S, settings.runs.foreground_s),
    ) -> CallToolResult:
        with tool_errors():
            view = await service_of(ctx).read_output(
                owner_of(ctx), sandbox_id, run_id, offset=offset, wait_s=wait_s, report=reporter(ctx)
            )
        return answer(view)


def _register_stop_run(mcp: MCPServer[SandboxService]) -> None:
    @mcp.tool(
        title="Stop run",
        description=(
            "Stop a run and return its result, as run_code would have: interrupted if it reacts (variables are kept), "
            "else killed (variables are lost, files kept). A run that is over already only gives its result."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=True),
        structured_output=False,
    )
    async def stop_run(ctx: ToolContext, sandbox_id: SandboxId, run_id: RunId) -> CallToolResult:
        with tool_errors():
            result = await service_of(ctx).stop_run(owner_of(ctx), sandbox_id, run_id)
        return answer(result)
