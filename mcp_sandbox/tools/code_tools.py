"""Tools that run code and follow long runs."""

from typing import Annotated, Literal

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import BaseModel, ConfigDict, Field

from guest.client.reports import MAX_CASES
from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.runs import requests
from mcp_sandbox.runs.requests import MAX_FLAGS, MIN_MEMORY_MB, SANITIZERS, CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import RunId, SandboxId, ToolContext, hints, owner_of, reporter, service_of, tool_errors
from mcp_sandbox.tools.descriptions import may_be_online, network_of
from mcp_sandbox.tools.run_answers import InBackground, KeepProcesses, OneOffTemplate, answer, result_of, timeout_field

WAIT_S = 10.0  # default of read_output: few calls, and none that seems to hang


class Case(BaseModel):
    """A test case of a program."""

    model_config = ConfigDict(extra="forbid")

    stdin: str = ""
    expected: str | None = Field(default=None, description="Expected stdout; trailing whitespace is ignored.")


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add these tools."""
    _register_run_code(mcp, settings)
    _register_read_output(mcp, settings)
    _register_stop_run(mcp)


def _register_run_code(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    @mcp.tool(
        title="Run code",
        description=(
            "Run code in an isolated sandbox, in its template's language: Python, JavaScript, R, C++, Go, Java or "
            "shell. Returns stdout, stderr, new artifacts and the first images. Python, JavaScript and R add the value "
            "of the last expression and the traceback; C++, Go and Java add compiler output, times, peak memory and a "
            "verdict for each test case. With sandbox_id, files and, in Python, JavaScript and R, variables are kept "
            "for later runs. Without it, the code runs in a one-off sandbox and nothing is kept. "
            f"The working directory is {WORKSPACE}. Files in {OUTPUTS} are artifacts; figures of matplotlib and R are "
            "saved there automatically. A run over its time limit is interrupted (variables are kept), or killed if "
            "it does not react (files are kept). Long output is cut in the middle; the result says how to read it. "
            f"After {settings.runs.foreground_s:g} s a run continues in the background: use its run_id with "
            f"read_output and stop_run. {network_of(settings)}"
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=False, open_world=may_be_online(settings)),
        structured_output=False,
    )
    async def run_code(
        ctx: ToolContext,
        code: Annotated[str, Field(description="Source code.")],
        sandbox_id: SandboxId | None = None,
        template: OneOffTemplate = None,
        timeout_s: Annotated[float | None, timeout_field(settings)] = None,
        background: InBackground = False,
        keep_processes: KeepProcesses = False,
        stdin: Annotated[str | None, Field(description="Standard input of the code.")] = None,
        cases: Annotated[
            list[Case] | None,
            Field(
                min_length=1,
                max_length=MAX_CASES,
                description="C++, Go, Java: test cases; compiled once, then run and judged one by one.",
            ),
        ] = None,
        case_timeout_s: Annotated[
            float | None,
            Field(gt=0, le=settings.runs.max_timeout_s, description="Time limit of each case in seconds; default 10."),
        ] = None,
        memory_limit_mb: Annotated[
            int | None, Field(ge=MIN_MEMORY_MB, description="C++, Go, Java: memory limit of the program.")
        ] = None,
        flags: Annotated[
            list[str] | None,
            Field(max_length=MAX_FLAGS, description="Added to g++ -O2 -std=c++23, go build or javac."),
        ] = None,
        sanitize: Annotated[
            list[Literal["address", "undefined", "thread"]] | None,
            Field(max_length=len(SANITIZERS), description="C++: sanitizers. Go: thread, the race detector."),
        ] = None,
    ) -> CallToolResult:
        request = CodeRun(
            owner_of(ctx),
            code,
            sandbox_id,
            template,
            timeout_s,
            keep_processes=keep_processes,
            stdin=stdin,
            cases=None if cases is None else tuple(requests.Case(case.stdin, case.expected) for case in cases),
            case_timeout_s=case_timeout_s,
            memory_limit_mb=memory_limit_mb,
            flags=None if flags is None else tuple(flags),
            sanitize=None if sanitize is None else tuple(sanitize),
        )
        return await result_of(ctx, request, background=background)


def _register_read_output(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    @mcp.tool(
        title="Read output",
        description=(
            "Read the output of a background run, during the run or after it: stdout and stderr in order of arrival. "
            "The last line says whether the run is active and which offset to read next. After the last output of a "
            "run that is over, values, traceback, artifacts and images follow. "
            f"A live sandbox keeps its last {settings.runs.kept} results."
        ),
        annotations=hints(read_only=True, destructive=False, idempotent=True),
        structured_output=False,
    )
    async def read_output(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        run_id: RunId,
        offset: Annotated[int, Field(ge=0, description="Byte offset in the output.")] = 0,
        wait_s: Annotated[
            float,
            Field(
                ge=0,
                le=settings.runs.foreground_s,
                description="Seconds to wait for the end of the run or a full page of output.",
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
            "Stop a run and return its result. The run is interrupted (variables are kept), or killed if it does not "
            "react (files are kept). If it is already over, this only returns its result."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=True),
        structured_output=False,
    )
    async def stop_run(ctx: ToolContext, sandbox_id: SandboxId, run_id: RunId) -> CallToolResult:
        with tool_errors():
            result = await service_of(ctx).stop_run(owner_of(ctx), sandbox_id, run_id)
        return answer(result)
