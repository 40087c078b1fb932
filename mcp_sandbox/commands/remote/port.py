"""`mcp-sandbox port`: a port on the loopback of this host that leads to one on the loopback of a sandbox."""

import json

import anyio
from anyio.abc import SocketAttribute, SocketStream
from rich.console import Console
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.remote.address import Address
from mcp_sandbox.commands.remote.client import refusal_of
from mcp_sandbox.commands.remote.errors import CannotForward, RequestRefused
from mcp_sandbox.commands.remote.sandboxes import path_of, server_for
from mcp_sandbox.commands.remote.sockets import open_socket
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.serving.lifetime import run_command

LOOPBACK = "127.0.0.1"
READ_BYTES = 32 << 10  # the server takes messages of up to 64 KiB
END = "end"  # the text message of a side that sends no more
PASSING = ("port_refused", "sandbox_paused", "sandbox_changing", "sandbox_busy")  # the next connection may work
GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def forward(settings: Settings, url: str | None, sandbox_id: str, port: int, host_port: int) -> int:
    """Carry connections until this command is interrupted or the sandbox ends."""

    def work() -> int:
        server = server_for(settings, url)
        box = path_of(sandbox_id)
        server.get(box)  # an id that does not exist is an error now, not at the first connection
        return run_command(lambda: _listen(server.address, f"{box}/ports/{port}", host_port))

    return report_errors(work)


async def _listen(address: Address, path: str, host_port: int) -> int:
    failure: SandboxError | None = None

    async def carry(client: SocketStream) -> None:
        nonlocal failure
        try:
            async with client, open_socket(address, path) as remote:
                await _carry(client, remote)
        except SandboxError as error:
            if isinstance(error, RequestRefused) and error.problem in PASSING:
                err.print(str(error), markup=False)
            else:  # the sandbox or the server is gone
                failure = error
                serving.cancel()

    try:
        listener = await anyio.create_tcp_listener(local_host=LOOPBACK, local_port=host_port)
    except OSError as error:
        raise CannotForward(host_port, error.strerror or str(error)) from error
    async with listener:
        chosen = listener.extra(SocketAttribute.local_port)  # noqa: S610 - not Django's
        out.print(f"http://{LOOPBACK}:{chosen}", markup=False)
        with anyio.CancelScope() as serving:
            await listener.serve(carry)
    assert failure is not None  # nothing else ends it, but for a signal
    raise failure


async def _carry(client: SocketStream, remote: ClientConnection) -> None:
    """Carry bytes both ways until both directions have ended. Raises RequestRefused if the server says why it ends."""
    last = ""

    async def to_client() -> None:
        nonlocal last
        async for message in remote:
            if isinstance(message, bytes):
                await client.send(message)
            elif message == END:
                await client.send_eof()
            else:
                last = message
        tasks.cancel_scope.cancel()

    async def to_sandbox() -> None:
        try:
            while True:
                await remote.send(await client.receive(READ_BYTES))
        except anyio.EndOfStream:
            await remote.send(END)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(to_client)
            tasks.start_soon(to_sandbox)
    except* (ConnectionClosed, *GONE, OSError):
        pass
    if last:
        raise refusal_of(json.loads(last))
