"""A client of the tasks extension, for tests: the MCP SDK has none."""

from collections.abc import Sequence
from typing import Any, Literal

from mcp.client import Client, ClientExtension
from mcp.client.extension import ResultClaim
from mcp_types import CallToolResult, Request, Result
from pydantic import ConfigDict

from mcp_sandbox.serving.tasks import EXTENSION

ERA = "2026-07-28"


class CreatedTask(Result):
    """The answer to a call that became a task."""

    model_config = ConfigDict(extra="allow")

    result_type: Literal["task"]
    task_id: str
    status: str
    ttl_ms: int
    poll_interval_ms: int
    created_at: str


class Answer(Result):
    """The answer to a request about a task."""

    model_config = ConfigDict(extra="allow")


class TaskRequest(Request[dict[str, Any], str]):
    """A request about a task."""

    name_param = "taskId"


class Tasks(ClientExtension):
    """Declares the extension, and accepts tasks."""

    identifier = EXTENSION

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=CreatedTask, resolve=_not_needed)]


async def _not_needed(*_: object) -> CallToolResult:
    raise AssertionError("tests follow tasks themselves")


async def start(client: Client, tool: str, **arguments: Any) -> CreatedTask:
    """Call a tool that must answer with a task."""
    created = await client.session.call_tool(tool, arguments, allow_claimed=True)
    assert isinstance(created, CreatedTask)
    return created


async def ask(client: Client, method: str, task_id: str, **more: Any) -> dict[str, Any]:
    """Send a request about a task."""
    request = TaskRequest(method=method, params={"taskId": task_id, **more})
    answer = await client.session.send_request(request, Answer)
    return answer.model_dump(by_alias=True, exclude_none=True)


async def state(client: Client, task: CreatedTask) -> dict[str, Any]:
    """Poll a task once."""
    return await ask(client, "tasks/get", task.task_id)


async def ended(client: Client, task: CreatedTask) -> dict[str, Any]:
    """Poll a task until it is over. The caller has a time limit."""
    while (view := await state(client, task))["status"] == "working":
        pass
    return view
