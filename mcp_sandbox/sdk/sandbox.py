"""A sandbox for asynchronous programs."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import anyio
from pydantic import BaseModel

from guest.places import OUTPUTS
from mcp_sandbox.errors import BadRequest, SandboxClosed, SandboxError, SandboxNotFound
from mcp_sandbox.sdk.errors import hinted
from mcp_sandbox.sdk.files import MAX_ENTRIES, MAX_READ_BYTES, AsyncFiles
from mcp_sandbox.sdk.link import Ask, Link, only_once
from mcp_sandbox.sdk.options import (
    BASE_URL,
    TEMPLATE,
    CodeOptions,
    CommandOptions,
    FetchOptions,
    SandboxOptions,
    SearchOptions,
)
from mcp_sandbox.sdk.results import RunResult
from mcp_sandbox.sdk.runs import AsyncRun
from mcp_sandbox.views import (
    ArtifactList,
    ArtifactView,
    ClosedSandbox,
    ForkedSandboxes,
    OutputPage,
    PageView,
    RunProgress,
    RunView,
    SandboxView,
    SearchView,
)
from mcp_sandbox.views.sandboxes import Reseed

TOKEN = "MCP_SANDBOX_TOKEN"  # noqa: S105 - the variable that has it
FAREWELL_S = 30.0  # for stopping a run or closing a sandbox

T = TypeVar("T", bound=BaseModel)


class AsyncSandbox:
    """A sandbox on the server at `base_url`, or in this process (`base_url=None`). It ends with its `async with`."""

    def __init__(
        self,
        template: str = TEMPLATE,
        *,
        base_url: str | None = BASE_URL,
        token: str | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        self._wanted: dict[str, Any] = {"template": template, **options}
        self._base_url = base_url
        self._token = token or os.environ.get(TOKEN)
        self._id: str | None = None  # None: not open yet
        self._link: Link | None = None  # None: not open
        self._held = AsyncExitStack()  # the link
        self.files = AsyncFiles(self._where)

    # -- its life ------------------------------------------------------------------------------------------

    async def open(self) -> Self:
        """Create the sandbox. `async with` does it, too, and also closes it.

        Raises:
            NoConnection, TokenRefused, UnknownTemplate, HostNotReady, SandboxError: there is none.
        """
        if self._id is not None:
            raise BadRequest("The sandbox has been opened before; create another one.")
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(Link.open(self._base_url, self._token))
            created = await make(link, only_once("/sandboxes", self._wanted), SandboxView, discard)
            self._take(created, link, stack.pop_all())
        return self

    def _take(self, box: SandboxView, link: Link, held: AsyncExitStack) -> Self:
        self._id, self._link, self._held = box.sandbox_id, link, held
        return self

    async def close(self) -> None:
        """End the sandbox and everything in it. Closing it again does nothing."""
        link, self._link = self._link, None
        if link is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                with anyio.move_on_after(FAREWELL_S), suppress(SandboxNotFound):
                    await link.ask(Ask("DELETE", f"/sandboxes/{self._id}"), ClosedSandbox)
            finally:
                await self._held.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @classmethod
    async def run_once(
        cls,
        code: str,
        template: str = TEMPLATE,
        base_url: str | None = BASE_URL,
        token: str | None = None,
        **options: Unpack[CodeOptions],
    ) -> RunResult:
        """Run code in a sandbox of its own, which ends afterwards with all of its files."""
        async with cls(template, base_url=base_url, token=token) as box:
            return await box.run(code, **options)

    @property
    def sandbox_id(self) -> str:
        """The id under which the server knows it."""
        self._where()
        assert self._id is not None
        return self._id

    async def info(self) -> SandboxView:
        """Return what it is made from, how it is isolated and how long it lives."""
        link, box = self._where()
        return await link.ask(Ask("GET", box), SandboxView)

    # -- runs ----------------------------------------------------------------------------------------------

    async def run(self, code: str, **options: Unpack[CodeOptions]) -> RunResult:
        """Run code and return its result. Code that fails is a normal result. A cancelled call stops its run."""
        return await self._result({"code": code, **options})

    async def run_command(self, command: str, **options: Unpack[CommandOptions]) -> RunResult:
        """Run a shell command and return its result."""
        return await self._result({"kind": "command", "command": command, **options})

    def stream(self, code: str, **options: Unpack[CodeOptions]) -> AsyncGenerator[OutputPage | RunResult, None]:
        """Run code and yield its output as it comes, then its result. Leaving the loop early stops the run."""
        return self._events({"code": code, **options})

    async def start(self, code: str, *, stdin_open: bool = False, **options: Unpack[CodeOptions]) -> AsyncRun:
        """Run code in the background. With `stdin_open`, it reads what `write_stdin` sends."""
        return await self._start({"code": code, "stdin_open": stdin_open, **options})

    async def start_command(
        self, command: str, *, stdin_open: bool = False, **options: Unpack[CommandOptions]
    ) -> AsyncRun:
        """Run a shell command in the background, such as a server, beside other commands and code."""
        return await self._start({"kind": "command", "command": command, "stdin_open": stdin_open, **options})

    async def _start(self, body: Mapping[str, Any]) -> AsyncRun:
        link, box = self._where()
        # In the background, so that there is an id to follow and stop the run by, whatever happens to connections.
        run = await make(link, only_once(f"{box}/runs", {**body, "background": True}), RunProgress, stop)
        return AsyncRun(self._where, run.run_id)

    async def _result(self, body: Mapping[str, Any]) -> RunResult:
        async with aclosing(self._events(body)) as events:
            async for event in events:
                if isinstance(event, RunResult):
                    return event
        raise AssertionError("events end with a result or an error")

    async def _events(self, body: Mapping[str, Any]) -> AsyncGenerator[OutputPage | RunResult, None]:
        run = await self._start(body)
        over = False
        try:
            async with aclosing(aiter(run)) as events:
                async for event in events:
                    over = isinstance(event, RunResult)
                    yield event
        except SandboxError:
            over = True
            raise
        finally:
            if not over:
                with anyio.move_on_after(FAREWELL_S, shield=True), suppress(SandboxError):
                    await run.stop()

    # -- copies, pauses, the web ---------------------------------------------------------------------------

    async def fork(self, count: int = 1, *, reseed: Reseed = "global") -> "list[AsyncSandbox]":
        """Return copies with all variables, processes and files. Each must be closed, too.

        Random generators that code has made (`numpy.random.default_rng(3)`) continue equally in all copies, unless
        `reseed` is "all".
        """
        link, box = self._where()
        async with AsyncExitStack() as stack:
            opened = [await self._own_link(stack) for _ in range(count)]
            made = await make(
                link, only_once(f"{box}/fork", {"count": count, "reseed": reseed}), ForkedSandboxes, discard
            )
            stack.pop_all()
        return [
            AsyncSandbox(base_url=self._base_url, token=self._token)._take(copy, *own)  # noqa: SLF001 - one of us
            for copy, own in zip(made.copies, opened, strict=True)
        ]

    async def _own_link(self, stack: AsyncExitStack) -> tuple[Link, AsyncExitStack]:
        """Return a link to the same server, with what closes it. It is closed with `stack` unless that is emptied."""
        held = await stack.enter_async_context(AsyncExitStack())
        return await held.enter_async_context(Link.open(self._base_url, self._token)), held

    async def pause(self) -> SandboxView:
        """Save the sandbox to disk and free its memory. `resume` continues it."""
        link, box = self._where()
        return await link.ask(Ask("POST", f"{box}/pause"), SandboxView)

    async def resume(self) -> SandboxView:
        """Continue the paused sandbox."""
        link, box = self._where()
        return await link.ask(Ask("POST", f"{box}/resume"), SandboxView)

    async def search(self, query: str, **options: Unpack[SearchOptions]) -> SearchView:
        """Search the web. The results are untrusted text."""
        link, _ = self._where()
        return await link.ask(Ask("POST", "/web/search", body={"query": query, **options}), SearchView)

    async def fetch(self, url: str, *, save: bool = False, **options: Unpack[FetchOptions]) -> PageView:
        """Fetch a page as text, which is untrusted. With `save`, the whole download becomes a file in the sandbox."""
        link, _ = self._where()
        kept = {"sandbox_id": self._id} if save else {}
        return await link.ask(Ask("POST", "/web/fetch", body={"url": url, **kept, **options}), PageView)

    # -- artifacts -----------------------------------------------------------------------------------------

    async def list_artifacts(self) -> list[ArtifactView]:
        """Return the files in /tmp/outputs."""
        link, box = self._where()
        found: list[ArtifactView] = []
        offset: int | None = 0
        while offset is not None and offset < MAX_ENTRIES:
            page = await link.ask(Ask("GET", f"{box}/artifacts", {"offset": offset}), ArtifactList)
            found += page.artifacts
            offset = page.next_offset
        if page.truncated:
            raise BadRequest(f"There are more files than a listing shows; use files.list({OUTPUTS!r}).")
        return found

    async def read_artifact(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the content of a file in /tmp/outputs."""
        return await self.files.read(str(PurePosixPath(OUTPUTS) / path), max_bytes=max_bytes)

    def _where(self) -> tuple[Link, str]:
        """Return the link, and the sandbox's path.

        Raises:
            BadRequest, SandboxClosed: it is not open.
        """
        if self._id is None:
            raise BadRequest("The sandbox is not open: use it in a `with` block, or call open().")
        if self._link is None:
            raise hinted(SandboxClosed(self._id), "Create a new one.")
        return self._link, f"/sandboxes/{self._id}"


async def make(link: Link, ask: Ask, kind: type[T], undo: Callable[[Link, T], Awaitable[None]]) -> T:
    """Create or start something. If the call is cancelled, it is undone: the server finishes what has a key."""
    try:
        return await link.ask(ask, kind)
    except anyio.get_cancelled_exc_class():
        with anyio.move_on_after(FAREWELL_S, shield=True), suppress(SandboxError):
            await undo(link, await link.ask(ask, kind))
        raise


async def discard(link: Link, made: SandboxView | ForkedSandboxes) -> None:
    """Close sandboxes that nobody waits for any more."""
    for box in made.copies if isinstance(made, ForkedSandboxes) else [made]:
        with suppress(SandboxError):
            await link.ask(Ask("DELETE", f"/sandboxes/{box.sandbox_id}"), ClosedSandbox)


async def stop(link: Link, run: RunProgress) -> None:
    """Stop a run that nobody waits for any more."""
    await link.ask(Ask("POST", f"/sandboxes/{run.sandbox_id}/runs/{run.run_id}/stop"), RunView)
