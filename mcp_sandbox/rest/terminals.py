"""A terminal in a sandbox over a WebSocket.

Binary messages are bytes of the terminal, both ways. The client's text messages are sizes, such as
`{"columns": 120, "rows": 40}`. The server's only text message is its last one: how the shell ended, such as
`{"exit_code": 0, "signal": null}`, or a problem.
"""

import logging
from dataclasses import asdict

import anyio
from pydantic import Field
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from guest.client.terminals import ShellEnd, Size, Terminal
from guest.errors import first_error
from guest.protocol import encode_json
from guest.terminals import MAX_SIDE, MAX_TERM
from mcp_sandbox.accounts.audit import audited
from mcp_sandbox.accounts.owners import TokenReadOnly, current_owner, may_change
from mcp_sandbox.errors import BadRequest, SandboxError
from mcp_sandbox.rest.bodies import Given
from mcp_sandbox.rest.operations import ID, checked
from mcp_sandbox.rest.problems import answer_with, problem_of, refusal
from mcp_sandbox.sandboxes.service import SandboxService

PATH = "/sandboxes/{sandbox_id}/terminal"
TOOL = "run_command"  # a terminal is offered if this tool is: it can do the same
ENDED, FAILED = 1000, 1011  # codes of the protocol

logger = logging.getLogger(__name__)


class SizeBody(Given):
    """The size of a terminal in characters."""

    columns: int = Field(80, ge=1, le=MAX_SIDE)
    rows: int = Field(24, ge=1, le=MAX_SIDE)

    @property
    def size(self) -> Size:
        """The same for the service."""
        return Size(self.columns, self.rows)


class TerminalQuery(SizeBody):
    """The terminal to open."""

    term: str = Field("xterm-256color", min_length=1, max_length=MAX_TERM, pattern=r"^[\x21-\x7e]+$")


class TerminalEndpoint:
    """Serves terminals of one service."""

    def __init__(self, service: SandboxService) -> None:
        self._service = service

    async def serve(self, socket: WebSocket) -> None:
        """Open a terminal and carry its bytes. Errors before that are ordinary answers."""
        try:
            with audited("rest", "terminal") as entry:
                entry.about(socket.path_params["sandbox_id"])
                await self._serve(socket)
        except SandboxError as error:
            problem = problem_of(error)
            await _end(socket, problem.model_dump_json(), FAILED, answer_with(problem))
        except Exception:
            logger.exception("a terminal failed")
            await _end(socket, None, FAILED, refusal(500))

    async def _serve(self, socket: WebSocket) -> None:
        if not may_change():
            raise TokenReadOnly
        sandbox_id = str(socket.path_params["sandbox_id"])
        if not ID.fullmatch(sandbox_id):
            raise BadRequest("The sandbox_id in the path has characters that no id has, or is too long.")
        query = checked("query", lambda: TerminalQuery.model_validate(dict(socket.query_params)))
        async with self._service.terminal(current_owner(), sandbox_id, query.size, query.term) as terminal:
            await socket.accept()
            end = await _carry(socket, terminal)
        if end is not None:
            await _end(socket, encode_json(asdict(end)).decode(), ENDED)


async def _carry(socket: WebSocket, terminal: Terminal) -> ShellEnd | None:
    """Carry bytes both ways until the shell has ended; returns how it did, or None if the client has left."""

    async def show() -> None:
        while data := await terminal.receive():
            await socket.send_bytes(data)
        tasks.cancel_scope.cancel()

    async def take() -> None:
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            if (data := message.get("bytes")) is not None:
                await terminal.send(data)
            else:
                text = str(message.get("text"))
                await terminal.resize(checked("size", lambda: SizeBody.model_validate_json(text)).size)  # noqa: B023
        tasks.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(show)
            tasks.start_soon(take)
    except* WebSocketDisconnect:
        pass
    except* Exception as group:
        raise first_error(group) from group
    return terminal.end


async def _end(socket: WebSocket, last: str | None, code: int, denial: Response | None = None) -> None:
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
