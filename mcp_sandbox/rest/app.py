"""The application below /api/v1."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from mcp_sandbox.accounts.owners import may_change
from mcp_sandbox.rest import archives, files, ports, runs, sandboxes, sockets, terminals, web
from mcp_sandbox.rest.idempotency import Keys
from mcp_sandbox.rest.openapi import document
from mcp_sandbox.rest.operations import Operation
from mcp_sandbox.rest.problems import refused
from mcp_sandbox.sandboxes.service import SandboxService

OPERATIONS: tuple[Operation[Any, Any], ...] = (
    *sandboxes.OPERATIONS,
    *runs.OPERATIONS,
    *files.OPERATIONS,
    *archives.OPERATIONS,
    *web.OPERATIONS,
)

Answer = Callable[[Request], Awaitable[Response]]


@asynccontextmanager
async def open_rest(
    service: SandboxService, tools: Collection[str], reading: Collection[str] = ()
) -> AsyncIterator[Starlette]:
    """Open the application of a server with these tools, of which `reading` change nothing.

    Leaving it cancels requests with keys that are being done.
    """
    async with Keys() as keys:
        offered = [each for each in OPERATIONS if each.is_offered(tools)]
        paths = _paths(offered).items()
        tools_now = lambda: tools if may_change() else reading  # noqa: E731 - of the caller
        routes: list[BaseRoute] = [
            Route(path, _endpoint(there, service, keys, tools_now), methods=list(there)) for path, there in paths
        ]
        if sockets.TOOL in tools:
            routes.append(WebSocketRoute(terminals.PATH, terminals.TerminalEndpoint(service).serve))
            routes.append(WebSocketRoute(ports.PATH, ports.PortEndpoint(service).serve))
        app = Starlette(
            routes=[Route("/openapi.json", _described(offered)), *routes], exception_handlers={HTTPException: refused}
        )
        app.router.redirect_slashes = False
        yield app


def _paths(operations: Iterable[Operation[Any, Any]]) -> dict[str, dict[str, Operation[Any, Any]]]:
    """Return the operations of each path by method."""
    paths: dict[str, dict[str, Operation[Any, Any]]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = operation
    return paths


def _endpoint(
    there: Mapping[str, Operation[Any, Any]],
    service: SandboxService,
    keys: Keys,
    tools_now: Callable[[], Collection[str]],
) -> Answer:
    async def answer(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await there[method].answer(service, keys, tools_now(), request)

    return answer


def _described(operations: Iterable[Operation[Any, Any]]) -> Answer:
    content = json.dumps(document(operations))

    async def answer(_request: Request) -> Response:
        return Response(content, media_type="application/json")

    return answer
