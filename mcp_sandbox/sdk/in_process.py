"""HTTP without a network: requests go to an application of the same process, and answers are read as they come.

httpx' own transport for applications collects the whole answer first: no live output, and large files fill the memory.
"""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
from anyio.abc import TaskGroup
from starlette.types import ASGIApp, Message


class InProcess(httpx2.AsyncBaseTransport):
    """A transport to one application, which answers in tasks of `tasks`."""

    def __init__(self, app: ASGIApp, tasks: TaskGroup) -> None:
        self._app = app
        self._tasks = tasks

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer once it has begun."""
        exchange = _Exchange(request)
        self._tasks.start_soon(exchange.carry_out, self._app)
        return await exchange.response()


class _Exchange(httpx2.AsyncByteStream):
    """A request and its answer. The answer's content is at most one part ahead of its reader."""

    def __init__(self, request: httpx2.Request) -> None:
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        self._request = request
        self._sent = aiter(request.stream)  # by the client
        self._all_sent = False
        self._begun = anyio.Event()
        self._left = anyio.Event()  # the client has
        self._head: Message | None = None
        self._failure: Exception | None = None
        self._writer, self._reader = anyio.create_memory_object_stream[bytes]()

    async def response(self) -> httpx2.Response:
        """Return the answer, whose content is this object."""
        try:
            await self._begun.wait()
        except BaseException:
            await self.aclose()
            raise
        if self._head is None:
            await self.aclose()
            raise httpx2.RemoteProtocolError(f"no answer: {self._failure}", request=self._request)
        return httpx2.Response(self._head["status"], headers=self._head.get("headers", []), stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._reader:
            yield part
        if self._failure is not None:
            raise httpx2.RemoteProtocolError(f"the answer broke off: {self._failure}", request=self._request)

    async def aclose(self) -> None:
        """Leave, like a client that closes its connection."""
        self._left.set()
        self._reader.close()

    async def carry_out(self, app: ASGIApp) -> None:
        """Let the application answer."""
        try:
            await app(self._scope(), self._receive, self._send)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the client has left
        except Exception as error:  # the reader is told
            self._failure = error
        finally:
            self._begun.set()
            self._writer.close()

    def _scope(self) -> dict[str, Any]:
        url = self._request.url
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self._request.method,
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.partition(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "server": (url.host, url.port),
            "client": ("127.0.0.1", 0),
        }

    async def _receive(self) -> Message:
        if self._all_sent:
            await self._left.wait()
            return {"type": "http.disconnect"}
        part = await anext(self._sent, None)
        self._all_sent = part is None
        return {"type": "http.request", "body": part or b"", "more_body": not self._all_sent}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            self._begun.set()
        elif message.get("body") and self._request.method != "HEAD":
            await self._writer.send(message["body"])
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._writer.close()
