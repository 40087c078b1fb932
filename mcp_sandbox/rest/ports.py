"""A connection to a port on the loopback of a sandbox, over a WebSocket.

Binary messages are bytes of the connection, both ways. The text message `end` says that its sender sends no more. The
server's last message may be another text: a problem.
"""

import anyio
from anyio.abc import ByteStream
from pydantic import Field
from starlette.websockets import WebSocket, WebSocketDisconnect

from guest.errors import first_error
from mcp_sandbox.accounts.owners import current_owner
from mcp_sandbox.rest import sockets
from mcp_sandbox.rest.bodies import Given
from mcp_sandbox.rest.operations import checked
from mcp_sandbox.sandboxes.service import SandboxService

PATH = "/sandboxes/{sandbox_id}/ports/{port}"
END = "end"
LAST_PORT = 65535
GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)


class PortPath(Given):
    """The port to connect to."""

    port: int = Field(ge=1, le=LAST_PORT)


class PortEndpoint:
    """Serves connections to ports of one service's sandboxes."""

    def __init__(self, service: SandboxService) -> None:
        self._service = service

    async def serve(self, socket: WebSocket) -> None:
        """Connect and carry bytes. Errors before that are ordinary answers."""
        await sockets.serve(socket, "port", self._serve)

    async def _serve(self, socket: WebSocket, sandbox_id: str) -> None:
        port = checked("path", lambda: PortPath.model_validate({"port": socket.path_params["port"]})).port
        async with self._service.connect(current_owner(), sandbox_id, port) as stream:
            await socket.accept()
            await _carry(socket, stream)
        await sockets.end(socket, None, sockets.ENDED)


async def _carry(socket: WebSocket, stream: ByteStream) -> None:
    """Carry bytes both ways until both directions have ended, or one end is gone."""

    ended = anyio.Event()  # the client sends no more

    async def to_client() -> None:
        async for data in stream:
            await socket.send_bytes(data)
        await socket.send_text(END)
        await ended.wait()
        tasks.cancel_scope.cancel()

    async def to_sandbox() -> None:
        """Receive until the client is gone, also after its end: nothing else tells that it is."""
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            if (data := message.get("bytes")) is not None:
                await stream.send(data)
            elif message.get("text") == END:
                await stream.send_eof()
                ended.set()
        tasks.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(to_client)
            tasks.start_soon(to_sandbox)
    except* (WebSocketDisconnect, *GONE):
        pass
    except* Exception as group:
        raise first_error(group) from group
