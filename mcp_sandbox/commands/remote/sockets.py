"""WebSockets to a server, for the commands that carry bytes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus

from mcp_sandbox.commands.remote.address import ROOT, Address
from mcp_sandbox.commands.remote.client import CONNECT_S, refusal
from mcp_sandbox.commands.remote.errors import ServerUnreachable

MAX_MESSAGE_BYTES = 1 << 20
CLOSE_S = 1.0  # for the server to say goodbye


@asynccontextmanager
async def open_socket(address: Address, path: str) -> AsyncIterator[ClientConnection]:
    """Open a WebSocket at a path below the root. Raises RequestRefused, ServerUnreachable."""
    try:
        remote = await connect(
            f"{'wss' if address.tls else 'ws'}://{address.authority}{address.prefix}{ROOT}{path}",
            additional_headers=address.headers,
            compression=None,
            proxy=None,
            max_size=MAX_MESSAGE_BYTES,
            open_timeout=CONNECT_S,
            close_timeout=CLOSE_S,
        )
    except InvalidStatus as error:
        raise refusal(error.response.status_code, bytes(error.response.body or b"")) from error
    except (InvalidHandshake, OSError) as error:
        raise ServerUnreachable(str(address), getattr(error, "strerror", None) or str(error)) from error
    async with remote:
        yield remote
