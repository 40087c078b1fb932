"""A terminal in a sandbox over a WebSocket.

Binary messages are bytes of the terminal, both ways. The client's text messages are sizes, such as
`{"columns": 120, "rows": 40}`. The server's only text message is its last one: how the shell ended, such as
`{"exit_code": 0, "signal": null}`, or a problem.
"""

from dataclasses import asdict

import anyio
from pydantic import Field
from starlette.websockets import WebSocket, WebSocketDisconnect

from guest.client.terminals import ShellEnd, Size, Terminal
from guest.errors import first_error
from guest.protocol import encode_json
from guest.terminals import MAX_SIDE, MAX_TERM
from mcp_sandbox.accounts.owners import current_owner
from mcp_sandbox.rest import sockets
from mcp_sandbox.rest.bodies import Given
from mcp_sandbox.rest.operations import checked
from mcp_sandbox.sandboxes.service import SandboxService

PATH = "/sandboxes/{sandbox_id}/terminal"


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
        await sockets.serve(socket, "terminal", self._serve)

    async def _serve(self, socket: WebSocket, sandbox_id: str) -> None:
        query = checked("query", lambda: TerminalQuery.model_validate(dict(socket.query_params)))
        async with self._service.terminal(current_owner(), sandbox_id, query.size, query.term) as terminal:
            await socket.accept()
            end = await _carry(socket, terminal)
        if end is not None:
            await sockets.end(socket, encode_json(asdict(end)).decode(), sockets.ENDED)


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
