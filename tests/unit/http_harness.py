"""The product's HTTP server over fake machines, in another thread, for tests that are not asynchronous."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext

import anyio
import anyio.from_thread
import httpx2
from starlette.routing import Mount

from mcp_sandbox.config import Settings
from mcp_sandbox.rest.app import open_rest
from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.http import opened_gate
from mcp_sandbox.serving.server import create_server
from mcp_sandbox.serving.toolsets import tool_names
from tests.unit.fakes import FACTS, FakeProvider
from tests.waiting import HANG_S

SETTINGS = Settings(toolsets=("advanced",), limits={"sandboxes": 3, "queue_timeout_s": 0.01})


class Http:
    """A client that sends bodies as they are."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, client: httpx2.AsyncClient) -> None:
        self._portal, self._client = portal, client

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> httpx2.Response:
        """Post a body that need not be JSON."""
        return self._portal.call(self._request, "POST", path, body, headers or {})

    def delete(self, path: str) -> httpx2.Response:
        """Delete something."""
        return self._portal.call(self._request, "DELETE", path, b"", {})

    async def _request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> httpx2.Response:
        with anyio.fail_after(HANG_S):
            return await self._client.request(method, path, content=body, headers=headers)


@contextmanager
def serving_http(provider: FakeProvider) -> Iterator[Http]:
    """Serve MCP on `/mcp` and REST."""
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_client_over(provider)) as client,
    ):
        yield Http(portal, client)


@asynccontextmanager
async def _client_over(provider: FakeProvider) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    async with SandboxService(provider, SETTINGS) as service:
        server = create_server(SETTINGS, str(FACTS), lambda: nullcontext(service))
        async with (
            open_rest(service, tool_names(server)) as rest,
            opened_gate(SETTINGS, server, [Mount(ROOT, rest)], None) as gate,
            httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app=gate), base_url="http://127.0.0.1", headers=headers
            ) as client,
        ):
            yield client
