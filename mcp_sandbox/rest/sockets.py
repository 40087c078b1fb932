"""What all WebSockets of the API do alike: checks before they open, and how they end."""

import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from mcp_sandbox.accounts.audit import audited
from mcp_sandbox.accounts.owners import TokenReadOnly, may_change
from mcp_sandbox.errors import BadRequest, SandboxError
from mcp_sandbox.rest.operations import ID
from mcp_sandbox.rest.problems import answer_with, problem_of, refusal

TOOL = "run_command"  # WebSockets are offered if this tool is: it can do the same
ENDED, FAILED = 1000, 1011  # codes of the protocol

logger = logging.getLogger(__name__)

Serve = Callable[[WebSocket, str], Awaitable[None]]  # with the id of the sandbox


async def serve(socket: WebSocket, action: str, work: Serve) -> None:
    """Serve a WebSocket of a sandbox. Errors before it is accepted are ordinary answers."""
    try:
        with audited("rest", action) as entry:
            sandbox_id = str(socket.path_params["sandbox_id"])
            entry.about(sandbox_id)
            _check(sandbox_id)
            await work(socket, sandbox_id)
    except SandboxError as error:
        problem = problem_of(error)
        await end(socket, problem.model_dump_json(), FAILED, answer_with(problem))
    except Exception:
        logger.exception("a WebSocket failed: %s", action)
        await end(socket, None, FAILED, refusal(500))


def _check(sandbox_id: str) -> None:
    if not may_change():
        raise TokenReadOnly
    if not ID.fullmatch(sandbox_id):
        raise BadRequest("The sandbox_id in the path has characters that no id has, or is too long.")


async def end(socket: WebSocket, last: str | None, code: int, denial: Response | None = None) -> None:
    """Send the last message and close the connection; one that is not open yet is denied."""
    try:
        if socket.application_state is WebSocketState.CONNECTING and denial is not None:
            await socket.send_denial_response(denial)
        elif socket.application_state is WebSocketState.CONNECTED:
            if last is not None:
                await socket.send_text(last)
            await socket.close(code)
    except (WebSocketDisconnect, RuntimeError):  # the client has left
        pass
