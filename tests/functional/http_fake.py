"""The product's HTTP wiring in this process, over machines that exist only in memory."""

import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext

import anyio
from starlette.routing import Mount

from mcp_sandbox.accounts.owners import current_quota
from mcp_sandbox.accounts.tokens import Token
from mcp_sandbox.config import Settings
from mcp_sandbox.rest.app import open_rest
from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.gate import FindToken
from mcp_sandbox.serving.http import listening, opened_gate, web_server
from mcp_sandbox.serving.server import SandboxServer, create_server
from mcp_sandbox.serving.toolsets import reading_tools, tool_names
from tests.unit.fakes import FACTS, FakeProvider

SETTINGS = Settings(serve={"port": 0})


def finding(tokens: Mapping[str, Token]) -> FindToken:
    """Find tokens by their secrets."""

    async def find(secret: str) -> Token | None:
        return tokens.get(secret)

    return find


def _leave_as_it_is(_server: SandboxServer) -> None:
    """The product's own tools only."""


@asynccontextmanager
async def serving_fakes(
    provider: FakeProvider,
    change: Callable[[SandboxServer], None] = _leave_as_it_is,
    find_token: FindToken | None = None,
    settings: Settings = SETTINGS,
) -> AsyncIterator[str]:
    """Serve sandboxes of `provider` on a free port; yield the address of the MCP server."""
    async with SandboxService(provider, settings, current_quota=current_quota) as service:
        server = create_server(settings, str(FACTS), lambda: nullcontext(service))
        change(server)
        with listening(settings.serve) as listener:
            async with (
                open_rest(service, tool_names(server), reading_tools(server)) as rest,
                opened_gate(settings, server, [Mount(ROOT, rest)], find_token) as gate,
                anyio.create_task_group() as tasks,
            ):
                web = web_server(gate, settings.serve)
                tasks.start_soon(_serve, web.serve, listener)
                try:
                    yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
                finally:
                    web.should_exit = True
                    web.force_exit = True  # without waiting for clients


async def _serve(serve: Callable[..., object], listener: socket.socket) -> None:
    await serve(sockets=[listener])  # type: ignore[misc]
