"""A server over HTTP in this process, and a blocking client of it that adds little to what is measured."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any, Self

import anyio

from mcp_sandbox.commands.bench.subject import MeasurementFailed
from mcp_sandbox.config import Settings
from mcp_sandbox.connect.link import Link, events_in
from mcp_sandbox.connect.messages import VERSION_KEY, parse
from mcp_sandbox.serving.gate import FindToken
from mcp_sandbox.serving.http import listening, opened_app, web_server

META = {VERSION_KEY: "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
REST = "/api/v1"
CHUNK_BYTES = 1 << 20
LOCAL = {"serve.host": "127.0.0.1", "serve.port": 0, "serve.requests_per_minute": 1_000_000}


@asynccontextmanager
async def serving(settings: Settings, find_token: FindToken | None = None) -> AsyncIterator[int]:
    """Serve on a free port, which is yielded."""
    settings = settings.changed(LOCAL)
    with listening(settings.serve) as listener:
        async with opened_app(settings, find_token) as face, anyio.create_task_group() as tasks:
            web = web_server(face.gate, settings.serve)
            tasks.start_soon(partial(web.serve, sockets=[listener]))
            try:
                yield int(listener.getsockname()[1])
            finally:
                web.should_exit = True


def mcp_call(tool: str, arguments: dict[str, Any]) -> bytes:
    """Return a request that calls a tool."""
    params = {"name": tool, "arguments": arguments, "_meta": META}
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()


def call_over_http(link: Link, message: bytes) -> None:
    """Call a tool, and raise MeasurementFailed if that fails."""
    connection = link.send("POST", parse(message).headers, message)
    response = connection.getresponse()
    if response.headers.get_content_type() == "text/event-stream":
        answer = b"".join(event.data for event in events_in(response))
    else:
        answer = response.read()
    response.read()
    link.give_back(connection, response)
    if response.status != 200 or b'"isError":true' in answer:
        raise MeasurementFailed(f"A call over HTTP failed: {answer[:200]!r}")


class RestClient:
    """Sends one request after the other on one connection. Every failure is a MeasurementFailed."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self._connection = HTTPConnection("127.0.0.1", port)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Send and receive JSON."""
        data = None if body is None else json.dumps(body).encode()
        answer = json.loads(self._sent(method, path, data, "application/json").read())
        return dict(answer)

    def create(self) -> str:
        """Create a sandbox, and return its path."""
        return f"/sandboxes/{self.ask('POST', '/sandboxes')['sandbox_id']}"

    def run(self, box: str, code: str) -> None:
        """Run code in a sandbox."""
        if self.ask("POST", f"{box}/runs", {"code": code})["status"] != "ok":
            raise MeasurementFailed("A run over REST failed.")

    def upload(self, path: str, parts: Iterable[bytes]) -> None:
        """Send a file in parts."""
        self._sent("PUT", path, parts, "application/octet-stream").read()

    def download(self, path: str) -> int:
        """Receive a file in parts, and return its size."""
        answer, size = self._sent("GET", path, None, ""), 0
        while part := answer.read(CHUNK_BYTES):
            size += len(part)
        return size

    def _sent(self, method: str, path: str, body: bytes | Iterable[bytes] | None, kind: str) -> Any:  # noqa: ANN401
        headers = self._headers | ({"Content-Type": kind} if body is not None else {})
        self._connection.request(method, REST + path, body, headers, encode_chunked=not isinstance(body, bytes))
        answer = self._connection.getresponse()
        if answer.status >= 400:
            raise MeasurementFailed(f"{method} {path} was answered {answer.status}: {answer.read()[:300]!r}")
        return answer


def took_ms(work: Callable[[], object]) -> float:
    """Do something and return how many milliseconds it took."""
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)
