"""A run as it goes on: its output, then its result. A lost connection loses and repeats nothing."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing
from typing import NamedTuple

import anyio

from mcp_sandbox.sdk.errors import NoConnection, error_of
from mcp_sandbox.sdk.link import PAUSES_S, Ask, Link, Unanswered, view
from mcp_sandbox.sdk.results import RunResult
from mcp_sandbox.views import OutputPage


class Event(NamedTuple):
    """A server-sent event."""

    kind: str
    number: str  # the id to go on after
    data: str


async def follow(link: Link, run: str) -> AsyncGenerator[OutputPage | RunResult, None]:
    """Yield the output of the run at a path as it comes, then its result.

    Raises:
        SandboxError: why there is no result.
    """
    last, pauses_s = "", iter(PAUSES_S)
    while True:
        lost = Unanswered(NoConnection(link.url, "the events broke off"))
        try:
            async with aclosing(_events_after(link, run, last)) as events:
                async for event in events:
                    last, pauses_s = event.number, iter(PAUSES_S)
                    if event.kind == "output":
                        yield view(OutputPage, event.data)
                    elif event.kind == "result":
                        yield view(RunResult, event.data)
                        return
                    elif event.kind == "error":
                        raise error_of(link.url, run, 500, event.data.encode())
        except Unanswered as failure:
            lost = failure
        pause_s = next(pauses_s, None)
        if pause_s is None:
            raise lost.error
        await anyio.sleep(max(pause_s, lost.pause_s))


async def _events_after(link: Link, run: str, last: str) -> AsyncGenerator[Event, None]:
    ask = Ask("GET", f"{run}/events", headers={"Last-Event-ID": last} if last else {})
    async with link.attempt(ask) as answer:
        found: dict[str, str] = {}
        async for line in _lines(answer.aiter_bytes()):
            name, _, value = line.partition(":")
            if line:
                found[name] = value.removeprefix(" ")
            elif "data" in found:
                yield Event(found.get("event", ""), found.get("id", ""), found["data"])
                found = {}


async def _lines(parts: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield lines that end with a newline. httpx would also cut at characters that JSON leaves as they are."""
    unfinished = b""
    async for part in parts:
        *lines, unfinished = (unfinished + part).split(b"\n")
        for line in lines:
            yield line.decode()
