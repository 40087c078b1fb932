"""The REST application over fake machines, and a client of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount
from starlette.types import ASGIApp, Message

from mcp_sandbox.config import Settings
from mcp_sandbox.rest.app import open_rest
from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.rest.problems import refused
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.toolsets import add_tools, reading_tools, tool_names
from mcp_sandbox.web.searching import providers_of
from mcp_sandbox.web.web import Web
from tests.unit.fakes import FakeProvider
from websearch.jobs import Jobs


@asynccontextmanager
async def rest_over(
    provider: FakeProvider, settings: Settings | None = None, jobs: Jobs | None = None
) -> AsyncIterator[ASGIApp]:
    """The application; `jobs` answer as the machine that reaches the web."""
    settings = settings or Settings(toolsets=["advanced"])
    web = None if jobs is None else Web(jobs, settings.web, providers_of(settings.web))
    server = server_with(settings)
    async with (
        SandboxService(provider, settings, web=web) as service,
        open_rest(service, tool_names(server), reading_tools(server)) as rest,
    ):
        yield Starlette(routes=[Mount(ROOT, rest)], exception_handlers={HTTPException: refused})


def server_with(settings: Settings) -> MCPServer[SandboxService]:
    """A server with the tools that these settings leave."""
    server: MCPServer[SandboxService] = MCPServer("test")
    add_tools(server, settings, "none")
    return server


def tools_with(settings: Settings) -> frozenset[str]:
    """The names of the tools that these settings leave."""
    return tool_names(server_with(settings))


def client_of(app: ASGIApp) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=f"http://127.0.0.1{ROOT}")


@dataclass
class Exchange:
    """One request of a client that may leave before it is answered, or before it has sent everything."""

    method: str
    path: str  # below the root, with a query
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    half_sent: bool = False  # more than `body` was announced and never comes
    leave: anyio.Event = field(default_factory=anyio.Event)
    sent: list[Message] = field(default_factory=list)  # by the server

    async def __call__(self, app: ASGIApp) -> None:
        path, _, query = self.path.partition("?")
        headers = {"host": "127.0.0.1", "content-type": "application/json", **self.headers}
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": self.method,
            "path": ROOT + path,
            "raw_path": (ROOT + path).encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
        }
        begun = False

        async def receive() -> Message:
            nonlocal begun
            if not begun:
                begun = True
                return {"type": "http.request", "body": self.body, "more_body": self.half_sent}
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)

        await app(scope, receive, send)

    @property
    def status(self) -> int | None:
        return next((int(message["status"]) for message in self.sent if message["type"] == "http.response.start"), None)
