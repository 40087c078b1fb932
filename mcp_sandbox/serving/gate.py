"""What every HTTP request passes first: the right host, a known origin, a valid token, and not too many of them."""

import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass

import anyio
from mcp.server.auth.middleware.auth_context import auth_context_var
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp_types import ErrorData, JSONRPCError
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sandbox.accounts.audit import Entry, client_address, record
from mcp_sandbox.accounts.owners import Caller
from mcp_sandbox.accounts.tokens import Token

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # for load balancers, which have no token
OPERATE_PATHS = frozenset({"/metrics"})
MCP_PATH = "/mcp"
METADATA_PATH = "/.well-known/oauth-protected-resource"  # for clients that have no token yet
REFUSED = -32000  # JSON-RPC leaves this number to servers
RECHECK_S = 10.0  # how often the token of an open WebSocket is looked up again
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

FindToken = Callable[[str], Awaitable[Token | None]]


@dataclass(frozen=True, slots=True)
class Names:
    """The names under which the server may be reached, and the web pages that may call it.

    A web page can point a name of its own at this address (DNS rebinding), so the Host header must be a known one.
    """

    hosts: Collection[str] = ()  # name, or name:port
    origins: Collection[str] = ()
    loopback: bool = True  # also by the names of the loopback address, with any port

    def knows_host(self, host: str | None) -> bool:
        """Return whether a Host header names this server."""
        return host is not None and (host in self.hosts or (self.loopback and _without_port(host) in LOOPBACK))

    def knows_origin(self, origin: str | None) -> bool:
        """Return whether a page may call this server. Programs send no origin."""
        if origin is None or origin in self.origins:
            return True
        scheme, separator, host = origin.partition("://")
        return bool(separator) and scheme in ("http", "https") and self.loopback and _without_port(host) in LOOPBACK


class RateLimit:
    """Counts requests by owner: a bucket that fills with time. The clock is handed in."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # what is left, and since when

    def wait_s(self, owner: str, per_minute: int | None = None) -> float:
        """Count a request; return 0, or in how many seconds the owner may send the next one."""
        size = per_minute or self._per_minute
        now = self._clock()
        left, since = self._buckets.get(owner, (float(size), now))
        left = min(size, left + (now - since) * size / 60)
        allowed = left >= 1
        self._buckets[owner] = (left - 1 if allowed else left, now)
        return 0.0 if allowed else (1 - left) * 60 / size


@dataclass(frozen=True, slots=True)
class Challenge:
    """What a refused client is told in WWW-Authenticate (RFC 6750), and where it learns who gives out tokens."""

    metadata_url: str | None = None  # of an OAuth resource server (RFC 9728)

    def header(self, **why: str) -> dict[str, str]:
        """Return the header. `why` has the parameters `error` and `scope`, where they apply."""
        parts = why | ({"resource_metadata": self.metadata_url} if self.metadata_url else {})
        return {"WWW-Authenticate": " ".join(["Bearer", ", ".join(f'{k}="{v}"' for k, v in parts.items())]).strip()}


class Gate:
    """An ASGI application in front of another one."""

    def __init__(
        self,
        app: ASGIApp,
        names: Names,
        find_token: FindToken | None,
        rate: RateLimit,
        challenge: Challenge | None = None,
    ) -> None:
        self._app = app
        self._names = names
        self.find_token = find_token  # None: everybody who can connect is the local owner
        self._rate = rate
        self._challenge = challenge or Challenge()
        self._slowed: set[str] = set()  # tokens whose last request came too early
        self.draining = False  # the server stops: it finishes what it has and takes nothing new

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with its user."""
        if scope["type"] not in ("http", "websocket"):
            raise ValueError(f"only HTTP and WebSockets pass the gate, not {scope['type']}")
        request = HTTPConnection(scope)
        previous = client_address.set(request.client.host if request.client else None)
        try:
            await self._judge(request, receive, send)
        finally:
            client_address.reset(previous)

    async def _judge(self, request: HTTPConnection, receive: Receive, send: Send) -> None:
        scope = request.scope
        if (refusal := self._refuse_place(request)) is not None:
            await refusal(scope, receive, send)
            return
        path = request.url.path
        if path in OPEN_PATHS or path.startswith(METADATA_PATH) or self.find_token is None:
            await self._app(scope, receive, send)
            return
        secret = _secret_of(request)
        token = await self.find_token(secret) if secret else None
        refusal = self._refuse_stranger(request, secret) if token is None else self._refuse_token(request, token)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        assert token is not None
        if scope["type"] == "websocket":
            await self._while_valid(secret, self._pass(scope, receive, send, token))
        else:
            await self._pass(scope, receive, send, token)

    async def _while_valid(self, secret: str, passing: Coroutine[None, None, None]) -> None:
        """Pass a WebSocket on until its token is revoked or expires: it can outlive the request by hours."""
        find = self.find_token

        async def watch() -> None:
            while find is not None and await find(secret) is not None:  # noqa: ASYNC110 - no event tells of an expiry
                await anyio.sleep(RECHECK_S)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await passing
            tasks.cancel_scope.cancel()

    def _refuse_place(self, request: HTTPConnection) -> Response | None:
        if not self._names.knows_host(request.headers.get("host")):
            return _refuse(request, 421, "This server is not reached by that name; see serve.allowed_hosts.")
        origin = request.headers.get("origin")
        if not self._names.knows_origin(origin) or (request.scope["type"] == "websocket" and not self._is_ours(origin)):
            return _refuse(request, 403, "That web page may not call this server; see serve.allowed_origins.")
        if self.draining and request.url.path != "/healthz":
            return _refuse(request, 503, "The server is about to stop.", {"Retry-After": "5", "Connection": "close"})
        return None

    def _is_ours(self, origin: str | None) -> bool:
        """Return whether a WebSocket may be opened: browsers let every page try, and ask the server for no leave."""
        return origin is None or origin in self._names.origins

    def _refuse_stranger(self, request: HTTPConnection, secret: str) -> Response:
        challenge = self._challenge.header(error="invalid_token") if secret else self._challenge.header()
        return _refuse(request, 401, "Send a valid token: Authorization: Bearer …", challenge)

    def _refuse_token(self, request: HTTPConnection, token: Token) -> Response | None:
        action = request.scope.get("method", "WebSocket")
        allowed = ("operate",) if request.url.path in OPERATE_PATHS else ("use", "read")
        if not set(allowed) & set(token.scopes):
            record(Entry("http", action, outcome="insufficient_scope"), token, 0)
            challenge = self._challenge.header(error="insufficient_scope", scope=allowed[0])
            return _refuse(request, 403, f"The token lacks the scope {allowed[0]}.", challenge)
        wait_s = self._rate.wait_s(token.name, token.requests_per_minute)
        if not wait_s:
            self._slowed.discard(token.name)
        else:
            if token.name not in self._slowed:  # one line, however often it tries again
                self._slowed.add(token.name)
                record(Entry("http", action, outcome="too_many_requests"), token, 0)
            retry_s = int(wait_s) + 1
            why = f"Too many requests with this token. Send the next one in {retry_s} s."
            return _refuse(request, 429, why, {"Retry-After": str(retry_s)})
        return None

    async def _pass(self, scope: Scope, receive: Receive, send: Send, token: Token) -> None:
        """Pass a request on. The SDK binds a session to the user; tools read the owner from the context."""
        user = AuthenticatedUser(Caller.of(token))
        previous = auth_context_var.set(user)
        try:
            await self._app({**scope, "user": user}, receive, send)
        finally:
            auth_context_var.reset(previous)


def _secret_of(request: HTTPConnection) -> str:
    kind, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" else ""


def _refuse(request: HTTPConnection, status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    """Return a refusal in the language of the path. MCP clients show the message of an error; they skip problems."""
    if request.url.path == MCP_PATH:
        error = JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=REFUSED, message=why))
        return Response(error.model_dump_json(by_alias=True, exclude_unset=True), status, headers, "application/json")
    return JSONResponse({"title": why, "status": status}, status, headers, media_type="application/problem+json")


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdigit() else host
