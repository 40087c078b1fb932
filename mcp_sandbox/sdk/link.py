"""Requests to a server, or to the service of this process, and what is repeated when no answer comes.

A request is sent again only if that does no harm: it reads, it carries an Idempotency-Key, or it never left.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import httpx2
from pydantic import BaseModel

from mcp_sandbox.errors import BadRequest, SandboxError
from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.sdk.embedded import engine_in_use
from mcp_sandbox.sdk.errors import NoConnection, UnexpectedAnswer, error_of, hinted

CONNECT_S = 10.0
ANSWER_S = 600.0  # between two parts of an answer: a sandbox may have to wait for room
KEEP_S = 3.0  # how long an idle connection is used again; servers close theirs after 5 s
PAUSES_S = (0.1, 0.4, 1.5)  # before a request is repeated
MAX_PAUSE_S = 10.0  # that a server may ask for
HERE = "http://this-process"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)

T = TypeVar("T", bound=BaseModel)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. Its content is made anew each time it is sent."""

    method: str
    path: str  # below the root
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None  # as JSON
    content: Callable[[], AsyncIterator[bytes]] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def repeatable(self) -> bool:
        """Whether the server does nothing twice if it gets the request twice."""
        return self.method != "POST" or "Idempotency-Key" in self.headers

    def __str__(self) -> str:
        return f"{self.method} {ROOT}{self.path}"


def only_once(path: str, body: Mapping[str, Any]) -> Ask:
    """Return a request that creates or runs something, and does so once however often it is sent."""
    return Ask("POST", path, body=body, headers={"Idempotency-Key": uuid4().hex})


class Unanswered(Exception):
    """There is no answer, or not all of it, or one that asks for patience."""

    def __init__(self, error: SandboxError, *, pause_s: float = 0.0, harmless: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.pause_s = pause_s
        self.harmless = harmless  # nothing was done, whatever the request


class Link:
    """An open connection to a server, or to the service of this process."""

    def __init__(self, client: httpx2.AsyncClient, url: str) -> None:
        self.url = url
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str | None, token: str | None) -> AsyncIterator[Self]:
        """Open a link to a server; None: to the service of this process. Any task may close it.

        Raises:
            BadRequest: the address or the token is none.
            HostNotReady, TooWeak: this host cannot run sandboxes as configured.
        """
        async with AsyncExitStack() as stack:
            transport = await stack.enter_async_context(engine_in_use()) if url is None else None
            address = HERE if url is None else checked_address(url)
            client = httpx2.AsyncClient(
                base_url=f"{address}{ROOT}",
                headers=authorization(token),
                timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
                limits=httpx2.Limits(keepalive_expiry=KEEP_S),
                transport=transport,
                mounts={f"all://{host}": None for host in LOOPBACK},  # whatever proxy the environment names
            )
            stack.push_async_callback(client.aclose)
            yield cls(client, address)

    async def ask(self, ask: Ask, kind: type[T]) -> T:
        """Send a request and return its answer.

        Raises:
            SandboxError: as the server says, or because it cannot be reached.
        """

        async def whole() -> bytes:
            async with self.attempt(ask) as answer:
                return await answer.aread()

        data = await repeated(ask, whole)
        try:
            return view(kind, data)
        except ValueError as error:
            raise hinted(UnexpectedAnswer(self.url, 200, f"not a {kind.__name__}: {error}")) from None

    @asynccontextmanager
    async def attempt(self, ask: Ask) -> AsyncIterator[httpx2.Response]:
        """Send a request once, and yield its answer, whose content is to be read.

        Raises:
            Unanswered: it may be sent again, if it is repeatable.
            SandboxError: as the server says.
        """
        request = self._client.build_request(
            ask.method,
            ask.path,
            params=dict(ask.query),
            headers=dict(ask.headers),
            json=ask.body,
            content=ask.content() if ask.content else None,
        )
        try:
            answer = await self._client.send(request, stream=True)
            try:
                if not answer.is_success:
                    raise self._refusal(ask, answer, await answer.aread())
                yield answer
            finally:
                await answer.aclose()
        except httpx2.TransportError as error:
            lost = hinted(NoConnection(self.url, str(error) or type(error).__name__))
            raise Unanswered(lost, harmless=isinstance(error, NEVER_SENT)) from error

    def _refusal(self, ask: Ask, answer: httpx2.Response, content: bytes) -> SandboxError | Unanswered:
        error = error_of(self.url, str(ask), answer.status_code, content)
        pause = answer.headers.get("retry-after", "")
        return Unanswered(error, pause_s=_seconds(pause), harmless=True) if pause else error


async def repeated(ask: Ask, attempt: Callable[[], Awaitable[R]]) -> R:
    """Return what `attempt` does with the answer to a request, which is sent again while there is none.

    Raises:
        SandboxError: as the server says, or because it cannot be reached.
    """
    pauses_s = iter(PAUSES_S)
    while True:
        try:
            return await attempt()
        except Unanswered as failure:
            pause_s = next(pauses_s, None)
            if pause_s is None or not (ask.repeatable or failure.harmless):
                raise failure.error from failure.__cause__
            await anyio.sleep(max(pause_s, failure.pause_s))


def view(kind: type[T], data: bytes | str) -> T:
    """Return a view from its JSON. A newer server may tell more than this version knows. Raises ValueError."""
    return kind.model_validate_json(data, extra="ignore")


def checked_address(url: str) -> str:
    """Return the address of a server without the path of one of its faces.

    Raises:
        BadRequest: it is none.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # looked at only here, and may be no number
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadRequest(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000.")
    return url.rstrip("/").removesuffix("/mcp").removesuffix(ROOT)


def authorization(token: str | None) -> dict[str, str]:
    """Return the headers for a token, which may end with a newline: files do.

    Raises:
        BadRequest: no token has such characters.
    """
    token = (token or "").strip()
    if not (token.isascii() and token.isprintable()):
        raise BadRequest("The token has characters that no token has.")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _seconds(pause: str) -> float:
    return min(float(pause), MAX_PAUSE_S) if pause.isdigit() else 0.0
