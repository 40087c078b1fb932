"""MCP and REST over HTTP for many clients: one server, one pool, one service."""

import gc
import ipaddress
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sandbox import logs
from mcp_sandbox.accounts.accounts import Accounts
from mcp_sandbox.accounts.audit import open_audit
from mcp_sandbox.accounts.owners import current_quota
from mcp_sandbox.accounts.tokens import Tokens
from mcp_sandbox.app import open_host, open_operated
from mcp_sandbox.config import ServeSettings, Settings
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.operating.control import Panel
from mcp_sandbox.operating.metrics import enable_tracing
from mcp_sandbox.rest.app import open_rest
from mcp_sandbox.rest.next_steps import ROOT as REST
from mcp_sandbox.rest.problems import refused
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.connections import BoundedConnection, allow_many_files
from mcp_sandbox.serving.gate import MCP_PATH, Challenge, FindToken, Gate, Names, RateLimit
from mcp_sandbox.serving.lifetime import Drain, run_until_stopped
from mcp_sandbox.serving.oauth import metadata_routes, metadata_url
from mcp_sandbox.serving.replay import ResumableSessions
from mcp_sandbox.serving.server import SandboxServer, create_server
from mcp_sandbox.serving.stdio_server import in_force, log_config_files, max_message_bytes
from mcp_sandbox.serving.toolsets import reading_tools, tool_names

logger = logging.getLogger(__name__)

MAX_WEBSOCKET_BYTES = 64 << 10  # of one message: what is typed into a terminal
LAST_ANSWERS_S = 1  # after the runs have ended: for answers on their way and streams that never end


@dataclass(eq=False)
class UnsafeAddress(SandboxError):
    """The HTTP server would be open to others without tokens or without known names."""

    code = "unsafe_address"
    sentence = "The server does not listen on {host}: others could use it. {missing}"
    host: str
    missing: str


@dataclass(eq=False)
class AddressInUse(SandboxError):
    """The HTTP server cannot listen on its address."""

    code = "address_in_use"
    sentence = "The server cannot listen on {address}: {reason}."
    address: str
    reason: str


def run_http(settings: Settings) -> None:
    """Serve this host's sandboxes over HTTP until a signal arrives."""
    logs.configure(settings.log.level, settings.log.format)
    log_config_files()
    if settings.tracing:
        enable_tracing()
    allow_many_files()
    with closing(Tokens(settings.home)) as tokens, open_audit(settings.home, settings.serve.audit):
        accounts = Accounts(tokens, settings.oauth)
        guarded = partial(guard, settings.serve, accounts)
        guarded()  # before anybody can connect
        with listening(settings.serve) as listener:
            anyio.run(serve_http, settings, listener, guarded)


def guard(settings: ServeSettings, accounts: Accounts) -> FindToken | None:
    """Return how tokens are found; None where this host's users need none.

    Raises:
        UnsafeAddress: the server would be open to others.
    """
    exist = accounts.exist()
    if settings.require_token and not exist:
        raise UnsafeAddress(settings.host, "There is no token, and serve.require_token is set.")
    if not is_loopback(settings.host):
        if not exist:
            raise UnsafeAddress(settings.host, "There is no token yet.")
        if not settings.allowed_hosts:
            raise UnsafeAddress(settings.host, "No name of the server is set in serve.allowed_hosts.")
    return accounts.find if exist else None


def is_loopback(host: str) -> bool:
    """Return whether only programs of this host reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def listening(settings: ServeSettings) -> Iterator[socket.socket]:
    """Listen on the address of the settings. Raises AddressInUse."""
    address = f"{settings.host}:{settings.port}"
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=256)
    except OSError as error:
        raise AddressInUse(address, error.strerror or str(error)) from error
    with listener:
        # Connections inherit it. asyncio would set it, but not on a socket made here; answers in two parts took 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


async def serve_http(settings: Settings, listener: socket.socket, guarded: Callable[[], FindToken | None]) -> None:
    """Serve on a listening socket until a signal arrives, then let active runs end. SIGHUP reloads what can change."""
    serve = settings.serve
    find_token = guarded()
    url = _url(serve, listener)
    async with opened_app(settings, find_token, url) as face:
        web = web_server(face.gate, serve)

        async def stop() -> None:
            face.gate.draining = True
            with anyio.move_on_after(serve.drain_s):
                await face.service.runs_ended()
            web.should_exit = True

        def reload() -> None:
            try:
                reload_certificate(web, serve)
                face.gate.find_token = guarded() or face.gate.find_token  # a server never opens while it runs
            except (OSError, SandboxError) as error:
                logger.warning("reloading failed, and the server goes on as before: %s", error)
            else:
                logger.warning("reloaded; serving %s", _who(face.gate.find_token))

        sys.stderr.write(f"mcp-sandbox: serving {url}/mcp, {_who(find_token)}\n")
        await run_until_stopped(partial(web.serve, sockets=[listener]), drain=Drain(stop, serve.drain_s), reload=reload)


def web_server(app: ASGIApp, settings: ServeSettings) -> uvicorn.Server:
    """Return the program that speaks HTTP for an application. It ends soon after `should_exit` is set."""
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="websockets-sansio",
            ws_max_size=MAX_WEBSOCKET_BYTES,
            ws_per_message_deflate=False,  # a terminal's messages are short
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=list(map(str, settings.trusted_proxies)),
            timeout_graceful_shutdown=LAST_ANSWERS_S,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
        )
    )


def reload_certificate(web: uvicorn.Server, settings: ServeSettings) -> None:
    """Use the certificate as it is on disk now for new connections. Raises OSError."""
    if settings.certificate is not None:
        assert web.config.ssl is not None
        web.config.ssl.load_cert_chain(settings.certificate, settings.key)


class _Uvicorn(uvicorn.Server):
    """A server whose signals are handled elsewhere: see `run_until_stopped`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class HttpFace:
    """An ASGI application and the service behind it."""

    gate: Gate
    service: SandboxService


@asynccontextmanager
async def opened_app(
    settings: Settings, find_token: FindToken | None, url: str | None = None
) -> AsyncIterator[HttpFace]:
    """Open this host's service and yield the application that serves it, at `url`."""
    async with (
        open_host(settings) as host,
        open_operated(host, pooled=True, url=url, current_quota=current_quota) as (service, panel),
    ):
        server = create_server(for_http(settings), in_force(host), lambda: nullcontext(service))
        routes: list[BaseRoute] = [
            Route("/healthz", _answer("alive")),
            Route("/readyz", _answer("ready") if host.facts else _answer(in_force(host), 503)),
            Route("/metrics", _metrics(panel)),
        ]
        async with (
            open_rest(service, tool_names(server), reading_tools(server)) as rest,
            opened_gate(settings, server, [Mount(REST, rest), *routes], find_token) as gate,
        ):
            gc.freeze()  # what was imported is never garbage; a collection that looks at it holds up runs for 150 ms
            yield HttpFace(gate, service)


def for_http(settings: Settings) -> Settings:
    """Return the settings with only those directories of the host that are opened for clients over HTTP, too."""
    return settings.changed({"host_dirs": tuple(folder for folder in settings.host_dirs if folder.http)})


@asynccontextmanager
async def opened_gate(
    settings: Settings, server: SandboxServer, routes: Sequence[BaseRoute], find_token: FindToken | None
) -> AsyncIterator[Gate]:
    """Yield an application with an MCP server on `/mcp` and other routes, all behind a gate."""
    # MCPServer's own application has no place for our gate.
    sessions = ResumableSessions(server._lowlevel_server, max_message_bytes(settings))  # noqa: SLF001
    endpoint = Route(MCP_PATH, _Endpoint(sessions.handle_request))
    app = Starlette(
        routes=[endpoint, *routes, *metadata_routes(settings.oauth)], exception_handlers={HTTPException: refused}
    )
    names = Names(settings.serve.allowed_hosts, settings.serve.allowed_origins, is_loopback(settings.serve.host))
    async with sessions.run():
        rate = RateLimit(settings.serve.requests_per_minute)
        yield Gate(app, names, find_token, rate, Challenge(metadata_url(settings.oauth)))


class _Endpoint:
    """An ASGI application as a route: Starlette takes a function for one that answers a Request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


Answer = Callable[[Request], Awaitable[Response]]


def _answer(text: str, status: int = 200) -> Answer:
    async def answer(_request: Request) -> Response:
        return PlainTextResponse(f"{text}\n", status)

    return answer


def _metrics(panel: Panel) -> Answer:
    async def answer(_request: Request) -> Response:
        return PlainTextResponse(await panel.metrics(), media_type="text/plain; version=0.0.4")

    return answer


def _url(settings: ServeSettings, listener: socket.socket) -> str:
    scheme = "https" if settings.certificate else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _who(find_token: FindToken | None) -> str:
    return "for every program of this host: there are no tokens" if find_token is None else "with a token only"
