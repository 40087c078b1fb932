"""A small client for REST: requests, streams of bytes and of events. The standard library has all it needs."""

import json
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlencode

from mcp_sandbox.commands.next_steps import NEXT_STEPS
from mcp_sandbox.commands.remote.address import ROOT, Address
from mcp_sandbox.commands.remote.errors import RequestRefused, ServerUnreachable
from mcp_sandbox.views import ErrorView, with_next_step

CONNECT_S = 10.0
CHUNK_BYTES = 256 << 10
MAX_PROBLEM_BYTES = 1 << 20
OK = range(200, 300)
UNAUTHORIZED, NOT_FOUND = 401, 404
TOKEN_STEP = "Set MCP_SANDBOX_TOKEN to a token that `mcp-sandbox token create` printed on the server."  # noqa: S105

Query = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event."""

    kind: str
    data: Any  # JSON
    id: str | None


class Server:
    """One server. Every request has its own connection: commands send few."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def get(self, path: str, /, **query: str | int) -> Any:  # noqa: ANN401 - JSON
        """Return what the server has at a path below the root."""
        return self._json("GET", path, query)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        """Send JSON, and return the answer."""
        headers = {"Content-Type": "application/json"}
        return self._json("POST", path, {}, json.dumps(body or {}).encode(), headers)

    def delete(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Delete what is at a path, and return the answer."""
        return self._json("DELETE", path, {})

    def put(self, path: str, parts: Iterable[bytes], size: int | None, /, **query: str | int) -> Any:  # noqa: ANN401
        """Send bytes as they come, `size` in all if that is known, and return the answer."""
        return self._json("PUT", path, query, parts, {} if size is None else {"Content-Length": str(size)})

    def send(self, path: str, data: bytes, /, **query: str | int) -> Any:  # noqa: ANN401 - JSON
        """Send bytes, and return the answer."""
        return self._json("POST", path, query, data, {"Content-Type": "application/octet-stream"})

    @contextmanager
    def download(self, path: str, /, **query: str | int) -> Iterator[tuple[int | None, Iterator[bytes]]]:
        """Yield the size of what is at a path, if it is known, and its parts."""
        with self._answer("GET", path, query) as answer:
            size = answer.getheader("Content-Length")
            yield (int(size) if size else None), self._parts(answer, int(size) if size else None)

    def events(self, path: str, last_id: str | None = None) -> Iterator[Event]:
        """Yield the events of a stream after the one with `last_id`, until it or the connection ends."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        with self._answer("GET", path, {}, None, headers) as answer:
            fields: dict[str, str] = {}
            while line := answer.readline():
                name, _, value = line.decode().rstrip("\r\n").partition(":")
                if name:
                    fields[name] = value.removeprefix(" ")
                elif "event" in fields:  # an empty line ends an event; comments have no name
                    yield Event(fields["event"], json.loads(fields.get("data", "null")), fields.get("id"))
                    fields = {}

    def _parts(self, answer: HTTPResponse, size: int | None) -> Iterator[bytes]:
        received = 0
        while part := answer.read(CHUNK_BYTES):
            received += len(part)
            yield part
        if size is not None and received < size:
            raise ServerUnreachable(str(self.address), "the connection ended in the middle of the file")

    def _json(
        self,
        method: str,
        path: str,
        query: Query,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # noqa: ANN401 - JSON
        with self._answer(method, path, query, body, headers) as answer:
            return json.loads(answer.read())

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        query: Query,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[HTTPResponse]:
        """Send a request and yield its answer. Raises RequestRefused if it is an error."""
        target = f"{self.address.prefix}{ROOT}{path}{f'?{urlencode(query)}' if query else ''}"
        with self._mapped(), _connected(self.address) as connection:
            # A server that refuses a file does not read all of it; its answer says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, body, {**self.address.headers, **(headers or {})})
            answer = connection.getresponse()
            if answer.status not in OK:
                raise refusal(answer.status, answer.read(MAX_PROBLEM_BYTES))
            yield answer

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except (HTTPException, socket.gaierror, ssl.SSLError, ConnectionError, TimeoutError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerUnreachable(str(self.address), reason) from error


@contextmanager
def _connected(address: Address) -> Iterator[HTTPConnection]:
    kind = HTTPSConnection if address.tls else HTTPConnection
    connection = kind(address.host, address.port, timeout=CONNECT_S)
    try:
        connection.connect()
        connection.sock.settimeout(None)  # an answer takes as long as its work
        yield connection
    finally:
        connection.close()


def refusal(status: int, body: bytes) -> RequestRefused:
    """Return the error for an answer that is none of success."""
    if status == UNAUTHORIZED:
        return RequestRefused(f"The server needs a valid token. {TOKEN_STEP}")
    try:
        problem = json.loads(body)
        if status == NOT_FOUND and problem.get("code") is None:
            return RequestRefused("The server does not offer this. Its setting `toolsets` decides what it offers.")
        return refusal_of(problem)
    except (ValueError, LookupError, TypeError, AttributeError):  # it comes from a proxy, or from no server of ours
        return RequestRefused(f"The server answered with status {status}.")


def refusal_of(problem: Mapping[str, Any]) -> RequestRefused:
    """Return the error for a problem, with the step that a user of the command line can take."""
    code, said = problem.get("code"), str(problem.get("detail") or problem["title"])
    if code not in NEXT_STEPS:
        return RequestRefused(said, code)
    view = ErrorView(code=code, message=said, fields=problem.get("fields") or {})
    return RequestRefused(with_next_step(view, NEXT_STEPS), code, int(view.fields.get("taken", 0)))
