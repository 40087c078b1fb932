"""The one place that knows all sandboxes: owners, limits, deadlines and results."""

import secrets
from collections import OrderedDict
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio

from guest.client.messages import FileChunk, FileInfo, Listing
from guest.places import OUTPUTS
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import LimitReached, NotFound
from mcp_sandbox.execute import check, run_in
from mcp_sandbox.files import file_operation, read_all, resolve
from mcp_sandbox.provider import HostFacts, LeaseTimings, Provider
from mcp_sandbox.runs import RunRequest, RunResult
from mcp_sandbox.sandbox import FINAL, Lifespan, Sandbox, State
from templates.model import Template

MEMORY_OF_THE_DEAD = 256  # ended sandboxes whose end can still be explained


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """What an owner may know about a sandbox."""

    id: str
    template: Template
    state: State
    age_s: float
    expires_in_s: float
    facts: HostFacts
    timings: LeaseTimings


class SandboxService:
    """Sandboxes of many owners over one provider. Leaving it ends all of them."""

    def __init__(self, provider: Provider, settings: Settings) -> None:
        self.settings = settings
        self._provider = provider
        self._alive: dict[str, Sandbox] = {}
        self._dead: OrderedDict[str, Sandbox] = OrderedDict()
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        for box in self._alive.values():
            box.end(State.CLOSED, "the server stopped")
        return await self._tasks.__aexit__(kind, error, trace)

    # -- sandboxes -----------------------------------------------------------------------------------------

    async def create(self, owner: str, template: str | None = None) -> SandboxInfo:
        """A new sandbox, ready to use.

        Raises:
            LimitReached, TemplateNotBuilt, UnknownTemplate, HostNotReady, SandboxError: there is none.
        """
        box = await self._start(owner, template)
        return self._info(box)

    def sandboxes(self, owner: str) -> list[SandboxInfo]:
        """The owner's sandboxes, oldest first."""
        return [self._info(box) for box in self._alive.values() if box.owner == owner and box.state is State.READY]

    def alive(self) -> list[Sandbox]:
        """All sandboxes, whoever owns them, oldest first: for operators, not for callers."""
        return list(self._alive.values())

    async def close(self, owner: str, sandbox_id: str) -> bool:
        """End a sandbox and wait until nothing of it is left; False if it had ended before.

        Raises:
            NotFound: the owner never had such a sandbox.
        """
        box = self._find(owner, sandbox_id)
        was_alive = box.state in (State.STARTING, State.READY)
        box.end(State.CLOSED)
        await box.ended.wait()
        return was_alive

    async def _start(self, owner: str, template: str | None) -> Sandbox:
        limit = self.settings.max_sandboxes
        while len(self._alive) >= limit:
            going = next((box for box in self._alive.values() if box.state in FINAL), None)
            if going is None:
                raise LimitReached("max_sandboxes", limit, "Close a sandbox with close_sandbox, then try again.")
            await going.ended.wait()  # its machine takes memory until then
        lifespan = Lifespan(self.settings.idle_timeout_s, self.settings.max_lifetime_s)
        box = Sandbox(f"sb-{secrets.token_hex(8)}", owner, template or self.settings.template, lifespan)
        self._alive[box.id] = box
        self._tasks.start_soon(self._keep, box, name=f"keeper of {box.id}")
        try:
            await box.settled.wait()
        finally:
            if not box.settled.is_set():
                box.end(State.CLOSED, "its creation was cancelled")
        if box.state is not State.READY:
            raise box.error()
        return box

    async def _keep(self, box: Sandbox) -> None:
        try:
            await box.keep(self._provider)
        finally:
            del self._alive[box.id]
            self._dead[box.id] = box
            if len(self._dead) > MEMORY_OF_THE_DEAD:
                self._dead.popitem(last=False)

    def _find(self, owner: str, sandbox_id: str) -> Sandbox:
        box = self._alive.get(sandbox_id) or self._dead.get(sandbox_id)
        if box is None or box.owner != owner or box.state is State.FAILED:
            raise NotFound(sandbox_id)
        return box

    def _info(self, box: Sandbox) -> SandboxInfo:
        if box.lease is None:
            raise box.error()
        now = anyio.current_time()
        return SandboxInfo(
            id=box.id,
            template=box.lease.template,
            state=box.state,
            age_s=now - box.created,
            expires_in_s=max(0.0, box.expires_at()[0] - now),
            facts=box.lease.facts,
            timings=box.lease.timings,
        )

    # -- runs ----------------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> RunResult:
        """Run code in the sandbox the request names, or in a fresh one that is destroyed afterwards.

        Code that fails is a result. An exception says that there is none.

        Raises:
            BadRequest, NotFound, MachineLost, LimitReached, TemplateNotBuilt: as their names say.
        """
        checked = check(request, self.settings)
        if request.sandbox_id is not None:
            return await run_in(self._find(request.owner, request.sandbox_id), checked, self.settings)
        box = await self._start(request.owner, request.template)
        try:
            return await run_in(box, checked, self.settings)
        finally:
            box.end(State.CLOSED)  # its keeper cleans up, the caller need not wait

    # -- files ---------------------------------------------------------------------------------------------

    async def read(self, owner: str, sandbox_id: str, path: str, *, offset: int = 0, limit: int) -> FileChunk:
        """A part of a file."""
        where = resolve(path)
        async with self._find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                return await lease.agent.read(where, offset=offset, limit=limit)

    async def read_all(self, owner: str, sandbox_id: str, path: str, *, max_bytes: int | None = None) -> bytes:
        """A whole file, up to `max_bytes` or the limit of the settings."""
        limit = self.settings.max_read_bytes if max_bytes is None else max_bytes
        async with self._find(owner, sandbox_id).use() as lease:
            return await read_all(lease.agent, resolve(path), limit)

    async def write(self, owner: str, sandbox_id: str, path: str, data: bytes) -> FileInfo:
        """Create or replace a file, atomically."""
        where = resolve(path)
        if len(data) > self.settings.max_write_bytes:
            raise LimitReached("max_write_bytes", self.settings.max_write_bytes, f"{where} was not written.")
        async with self._find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                return await lease.agent.write(where, data)

    async def list_files(self, owner: str, sandbox_id: str, path: str, *, recursive: bool) -> Listing:
        """What is in a directory."""
        where = resolve(path)
        async with self._find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                return await lease.agent.list(where, recursive=recursive, max_entries=self.settings.max_list_entries)

    async def artifacts(self, owner: str, sandbox_id: str) -> Listing:
        """The files that runs have left for the owner."""
        return await self.list_files(owner, sandbox_id, OUTPUTS, recursive=True)
