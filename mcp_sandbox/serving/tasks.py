"""The tasks extension: a client that declares it gets a task where others get the id of a background run.

`io.modelcontextprotocol/tasks` lets the server decide when a call becomes a task. Ours does when a run is left in the
background: because the caller asked for it, or because it takes longer than clients wait. The client polls `tasks/get`
until the run is over, and gets what the call would have returned.

A task is only another name for a run. Its id has the ids of the sandbox and the run, so the server keeps nothing
about tasks, and whoever may not use the sandbox gets the answer for a task that never existed.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import require_client_extension
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    RequestParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import Field

from mcp_sandbox.accounts.audit import audited
from mcp_sandbox.accounts.owners import TokenReadOnly, current_owner, may_change
from mcp_sandbox.errors import SandboxError, SandboxNotFound
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.run_answers import answer
from mcp_sandbox.views import RUN_META, RunProgress

EXTENSION = "io.modelcontextprotocol/tasks"
VERSIONS = frozenset(MODERN_PROTOCOL_VERSIONS)  # older ones cannot carry the result of a call that became a task
POLL_MS = 1000
MAX_ID_CHARS = 256
ID = re.compile(r"(?P<sandbox>[\w-]{1,64})\.(?P<run>[\w-]{1,64})\.(?P<created>[0-9a-f]{1,11})")

TaskContext = ServerRequestContext[SandboxService, Any]
TaskStatus = Literal["working", "completed", "cancelled"]  # no run of ours asks for input or ends in a JSON-RPC error


class TaskParams(RequestParams):
    """Which task a request is about."""

    task_id: str = Field(alias="taskId", max_length=MAX_ID_CHARS)


class UpdateParams(TaskParams):
    """Answers to questions of a task."""

    input_responses: dict[str, Any] = Field(alias="inputResponses")


@dataclass(frozen=True, slots=True)
class Task:
    """A run as a task, and when the task was created."""

    sandbox_id: str
    run_id: str
    created_ms: int  # since 1970

    @classmethod
    def parse(cls, task_id: str) -> "Task":
        """Return the task with this id. Raises SandboxNotFound."""
        match = ID.fullmatch(task_id)
        if match is None:
            raise SandboxNotFound(task_id)
        return cls(match["sandbox"], match["run"], int(match["created"], 16))

    @property
    def id(self) -> str:
        """How clients name it."""
        return f"{self.sandbox_id}.{self.run_id}.{self.created_ms:x}"

    def view(self, status: TaskStatus, elapsed_s: float, expires_in_s: float) -> dict[str, Any]:
        """Return what clients learn about it. Its result is kept no longer than its sandbox lives."""
        verb = "has been running for" if status == "working" else "ended after"
        return {
            "taskId": self.id,
            "status": status,
            "statusMessage": f"Run {self.run_id} in sandbox {self.sandbox_id} {verb} {elapsed_s:.0f} s.",
            "createdAt": _iso(self.created_ms),
            "lastUpdatedAt": _iso(self.created_ms + round(1000 * elapsed_s)),
            "ttlMs": _now_ms() - self.created_ms + round(1000 * expires_in_s),
            "pollIntervalMs": POLL_MS,
        }


class RunTasks(Extension):
    """Background runs as tasks."""

    identifier = EXTENSION

    def methods(self) -> Sequence[MethodBinding]:
        """Return the extension's methods. It has none that lists tasks."""
        return [
            MethodBinding("tasks/get", TaskParams, _get, VERSIONS),
            MethodBinding("tasks/update", UpdateParams, _update, VERSIONS),
            MethodBinding("tasks/cancel", TaskParams, _cancel, VERSIONS),
        ]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: TaskContext, call_next: CallNext
    ) -> HandlerResult:
        """Answer with a task if the call has left a run in the background."""
        result = await call_next(ctx)
        if isinstance(result, CallToolResult) and params.name != "read_output" and _declared(ctx):
            run = (result.meta or {}).get(RUN_META)
            if run is not None and "elapsed_s" in run and run["result"] is None:
                return _created(ctx.lifespan_context, run, result)
        return result


async def check_listener(ctx: TaskContext, call_next: CallNext) -> HandlerResult:
    """Refuse task notifications to a client that did not declare the extension. The others get none, either."""
    wanted = (ctx.params or {}).get("notifications")
    if ctx.method == "subscriptions/listen" and isinstance(wanted, Mapping) and "taskIds" in wanted:
        require_client_extension(ctx, EXTENSION)
    return await call_next(ctx)


def _declared(ctx: TaskContext) -> bool:
    """Return whether the client declared the extension in this request."""
    capabilities = ctx.session.client_capabilities
    return ctx.protocol_version in VERSIONS and EXTENSION in ((capabilities and capabilities.extensions) or {})


def _created(service: SandboxService, run: dict[str, Any], result: CallToolResult) -> dict[str, Any]:
    task = Task(run["sandbox_id"], run["run_id"], _now_ms() - round(1000 * run["elapsed_s"]))
    view = task.view("working", run["elapsed_s"], _expires_in_s(service, task))
    return {"resultType": "task", **view, "_meta": result.meta}


async def _get(ctx: TaskContext, params: TaskParams) -> HandlerResult:
    """Return how far a run has got, and its result if it is over."""
    with _request(ctx, "tasks/get", params) as task:
        service = ctx.lifespan_context
        run = await service.read_output(current_owner(), task.sandbox_id, task.run_id, offset=0, wait_s=0)
        view = task.view(_status(run), run.elapsed_s, _expires_in_s(service, task))
        if view["status"] == "completed":
            ended = answer(run.result or run)
            ended.is_error = run.error is not None
            view["result"] = ended.model_dump(mode="json", by_alias=True, exclude_none=True)
        return view


async def _update(ctx: TaskContext, params: UpdateParams) -> HandlerResult:
    """Accept answers to questions that no task of ours asks."""
    with _request(ctx, "tasks/update", params) as task:
        await ctx.lifespan_context.read_output(current_owner(), task.sandbox_id, task.run_id, offset=0, wait_s=0)
        return {}


async def _cancel(ctx: TaskContext, params: TaskParams) -> HandlerResult:
    """Stop a run; nothing happens if it is over."""
    with _request(ctx, "tasks/cancel", params) as task:
        if not may_change():
            raise TokenReadOnly
        await ctx.lifespan_context.stop_run(current_owner(), task.sandbox_id, task.run_id)
        return {}


@contextmanager
def _request(ctx: TaskContext, method: str, params: TaskParams) -> Iterator[Task]:
    """Check and log a request about a task. Errors become JSON-RPC errors: a task is gone when its run is."""
    require_client_extension(ctx, EXTENSION)
    _check_route(ctx, params.task_id)
    try:
        with audited("mcp", method) as entry:
            task = Task.parse(params.task_id)
            entry.about(task.sandbox_id, task.run_id)
            yield task
    except SandboxError as error:
        raise MCPError(code=INVALID_PARAMS, message=f"Task {params.task_id!r} is not available. {error}") from error


def _check_route(ctx: TaskContext, task_id: str) -> None:
    """Check that proxies route the request by the task that it is about. The SDK checks only its own methods."""
    named = None if ctx.request is None else ctx.request.headers.get(MCP_NAME_HEADER)
    if named is not None and decode_header_value(named) != task_id:
        raise MCPError(code=HEADER_MISMATCH, message="mcp-name header does not match the request body's 'taskId'")


def _status(run: RunProgress) -> TaskStatus:
    if run.result is None and run.error is None:
        return "working"
    return "cancelled" if run.result is not None and run.result.stopped else "completed"


def _expires_in_s(service: SandboxService, task: Task) -> float:
    try:
        return service.get(current_owner(), task.sandbox_id).expires_in_s
    except SandboxError:  # its machine was lost
        return 0.0


def _now_ms() -> int:
    return time.time_ns() // 10**6


def _iso(since_1970_ms: int) -> str:
    moment = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=since_1970_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
