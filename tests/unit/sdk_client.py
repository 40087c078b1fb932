"""A sandbox of the SDK over fake machines, whose connection can fail."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest

from mcp_sandbox import AsyncSandbox
from mcp_sandbox.config import Settings
from mcp_sandbox.sdk import following, link
from mcp_sandbox.sdk.in_process import InProcess
from tests.unit.fakes import FakeProvider
from tests.unit.rest_client import rest_over
from tests.waiting import HANG_S
from websearch.jobs import Jobs

Fault = Callable[[httpx2.Request, httpx2.Response], httpx2.Response]  # or raises


class FaultyTransport(httpx2.AsyncBaseTransport):
    """Carries requests to the application, and spoils the answers as a test says."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport
        self._spoilt: list[httpx2.Response] = []
        self.sent: list[str] = []
        self.faults: list[tuple[str, Fault]] = []  # each for the next request that contains a word

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        line = f"{request.method} {request.url.path}"
        self.sent.append(line)
        answer = await self._transport.handle_async_request(request)
        fault = next((fault for fault in self.faults if fault[0] in line), None)
        if fault is None:
            return answer
        self.faults.remove(fault)
        self._spoilt.append(answer)
        return fault[1](request, answer)

    async def aclose_spoilt(self) -> None:
        """Close the answers that the client does not know of."""
        for answer in self._spoilt:
            await answer.aclose()

    def count(self, word: str) -> int:
        """How many requests with this word were sent."""
        return sum(word in line for line in self.sent)


def lost(request: httpx2.Request, _answer: httpx2.Response) -> httpx2.Response:
    """The connection breaks before the answer."""
    raise httpx2.ReadError("connection reset by peer", request=request)


@asynccontextmanager
async def faulty(
    monkeypatch: pytest.MonkeyPatch,
    provider: FakeProvider | None = None,
    jobs: Jobs | None = None,
    **settings: Any,
) -> AsyncIterator[FaultyTransport]:
    """Sandboxes with `base_url=None` are then made of fake machines."""
    monkeypatch.setattr(link, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(following, "PAUSES_S", (0.0, 0.0, 0.0))
    wanted = Settings(**{"toolsets": ["advanced"], **settings})
    with anyio.fail_after(HANG_S):
        async with rest_over(provider or FakeProvider(), wanted, jobs) as app, anyio.create_task_group() as tasks:
            transport = FaultyTransport(InProcess(app, tasks))

            @asynccontextmanager
            async def engine_in_use() -> AsyncIterator[httpx2.AsyncBaseTransport]:
                yield transport

            monkeypatch.setattr(link, "engine_in_use", engine_in_use)
            yield transport
            await transport.aclose_spoilt()
            tasks.cancel_scope.cancel()


def sandbox() -> AsyncSandbox:
    return AsyncSandbox(base_url=None)
