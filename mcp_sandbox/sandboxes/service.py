"""The one place that knows all sandboxes: owners, limits, deadlines and results."""

import math
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from guest.client.messages import FileChunk
from guest.places import OUTPUTS
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import FileTooLarge, RunLimit, RunNotStarted, SandboxNotFound
from mcp_sandbox.machines.provider import Lease, MachineRequest, Provider, find_template
from mcp_sandbox.runs.options import check_options
from mcp_sandbox.runs.results import RunRequest
from mcp_sandbox.runs.running import RunBook
from mcp_sandbox.sandboxes.admission import Admission, Limits, Ticket
from mcp_sandbox.sandboxes.execution import CheckedRun, check
from mcp_sandbox.sandboxes.file_access import file_operation, mime_of, read_all, resolve
from mcp_sandbox.sandboxes.forks import Forks, all_or_none, all_ready
from mcp_sandbox.sandboxes.graves import Graves
from mcp_sandbox.sandboxes.keeper import KeptSandbox
from mcp_sandbox.sandboxes.lifecycle import ALIVE, End, Lifespan, lifespan
from mcp_sandbox.sandboxes.run_calls import Report, lost_view, read_on, run_in_turn, stop
from mcp_sandbox.sandboxes.sandbox import Sandbox, Watcher
from mcp_sandbox.sandboxes.view import view_of
from mcp_sandbox.views import (
    ArtifactList,
    ArtifactView,
    FileList,
    FileView,
    RunProgress,
    RunView,
    SandboxView,
    WrittenFile,
    file_uri,
)


class SandboxService:
    """Sandboxes of many owners over one provider. Leaving it ends all of them."""

    def __init__(self, provider: Provider, settings: Settings, watcher: Watcher | None = None) -> None:
        self.settings = settings
        self._watcher = watcher or Watcher()
        limits = Limits.of(settings, provider.capacity.now)
        self.admission = Admission(limits, settings.limits.queue_timeout_s, self._watcher.refused)
        self._provider = provider
        self._catalogue = settings.catalogue
        self._alive: dict[str, Sandbox] = {}
        self._graves = Graves()
        self._forks = Forks(provider, self.admission, settings)
        self._tasks = anyio.create_task_group()
        self._following = anyio.CancelScope()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._follow_capacity, name="capacity of the hosts")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        for box in self._alive.values():
            box.end(End.CLOSED, "the server stopped")
        self._following.cancel()
        return await self._tasks.__aexit__(kind, error, trace)

    async def _follow_capacity(self) -> None:
        """Keep admission within what the provider's hosts can run."""
        with self._following:
            async for capacity in self._provider.capacity:
                self.admission.resize(Limits.of(self.settings, capacity))

    # -- sandboxes -----------------------------------------------------------------------------------------

    async def create(
        self, owner: str, template: str | None = None, *, ttl_s: float | None = None, idle_s: float | None = None
    ) -> SandboxView:
        """A new sandbox, ready to use.

        Raises:
            BadRequest, LimitReached, TemplateNotBuilt, UnknownTemplate, UnusableTemplate, HostNotReady, SandboxError:
                there is none.
        """
        return view_of(await self._start(owner, template, lifespan(self.settings, ttl_s, idle_s), one_off=False))

    def sandboxes(self, owner: str) -> list[SandboxView]:
        """The owner's sandboxes, oldest first."""
        return [view_of(box) for box in self._alive.values() if box.owner == owner and box.state in ALIVE]

    def alive(self) -> list[Sandbox]:
        """All sandboxes, whoever owns them, oldest first: for operators, not for callers."""
        return list(self._alive.values())

    async def close(self, owner: str, sandbox_id: str) -> bool:
        """End a sandbox and wait until nothing of it is left; False if it had ended before.

        Raises:
            SandboxNotFound: the owner never had such a sandbox.
        """
        if self._graves.find(owner, sandbox_id) is not None:
            return False
        return await self._find(owner, sandbox_id).close()

    async def _start(self, owner: str, template: str | None, span: Lifespan, *, one_off: bool) -> Sandbox:
        name = template or self.settings.template
        memory_mb = find_template(self._catalogue, name).machine.memory_mb
        ticket = Ticket(owner, memory_mb, passing=one_off)
        source = self._placed(ticket, self._provider.acquire(MachineRequest(name, owner)))
        box = self._open(name, span, ticket, source, one_off=one_off)
        with all_or_none([box]):
            await all_ready([box])
        return box

    def _open(
        self,
        template: str,
        span: Lifespan,
        ticket: Ticket,
        source: AbstractAsyncContextManager[Lease],
        *,
        one_off: bool = False,
    ) -> Sandbox:
        """A sandbox on its way to a machine."""
        runs = RunBook(self.settings.runs.kept, self.settings.runs.kept_bytes)
        box = KeptSandbox(
            f"sb-{secrets.token_hex(8)}", template, span, ticket, runs, source, one_off=one_off, watcher=self._watcher
        )
        self._alive[box.id] = box
        self._tasks.start_soon(self._keep, box, name=f"keeper of {box.id}")
        return box

    async def _keep(self, box: KeptSandbox) -> None:
        try:
            await box.keep()
        finally:
            del self._alive[box.id]
            if box.ending is not None:
                self._graves.add(box.ending)

    @asynccontextmanager
    async def _placed(self, ticket: Ticket, source: AbstractAsyncContextManager[Lease]) -> AsyncIterator[Lease]:
        """A machine of `source`, when its owner's turn has come."""
        asked_at = anyio.current_time()
        async with self.admission.place(ticket):
            waited_s = anyio.current_time() - asked_at
            async with source as lease:
                timings = replace(lease.timings, queue_s=lease.timings.queue_s + waited_s)
                yield replace(lease, timings=timings)

    def _find(self, owner: str, sandbox_id: str) -> Sandbox:
        if (grave := self._graves.find(owner, sandbox_id)) is not None:
            raise grave.error()
        box = self._alive.get(sandbox_id)
        if box is None or box.owner != owner:
            raise SandboxNotFound(sandbox_id)
        return box

    # -- forks and pauses ----------------------------------------------------------------------------------

    async def fork(self, owner: str, sandbox_id: str, count: int) -> list[SandboxView]:
        """Copies of a sandbox as it is now, each with a life of its own; the sandbox itself goes on. All or none.

        Raises:
            BadRequest, SandboxNotFound, SandboxBusy, SandboxPaused, CannotFreeze, LimitReached, SandboxError:
                nothing was copied.
        """
        return [view_of(copy) for copy in await self._forks.fork(self._find(owner, sandbox_id), count, self._open)]

    async def pause(self, owner: str, sandbox_id: str) -> SandboxView:
        """Freeze a sandbox and give its machine's memory back to the host. Only its time to live goes on.

        Raises:
            SandboxNotFound, SandboxBusy, CannotFreeze, LimitReached, SandboxError: it is as it was, or over.
        """
        box = self._find(owner, sandbox_id)
        await self._forks.pause(box)
        return view_of(box)

    async def resume(self, owner: str, sandbox_id: str) -> SandboxView:
        """Let a paused sandbox go on, when there is a place for its machine.

        Raises:
            SandboxNotFound, MachineLost, LimitReached, SandboxError: it is paused as before, or over.
        """
        box = self._find(owner, sandbox_id)
        await self._forks.resume(box, self._placed)
        return view_of(box)

    # -- runs ----------------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> RunView:
        """Run code in the sandbox the request names, or in a fresh one that is destroyed afterwards.

        Code that fails is a result. An exception says that there is none.

        Raises:
            BadRequest, SandboxNotFound, SandboxBusy, MachineLost, LimitReached, TemplateNotBuilt: as their names say.
        """
        checked = check(request, self.settings, self.settings.runs.timeout_s)
        result = await self._run(request, checked, math.inf, None)
        assert isinstance(result, RunView), "whoever waits for ever gets a result"
        return result

    async def run_for_client(
        self, request: RunRequest, *, background: bool = False, report: Report | None = None
    ) -> RunView | RunProgress:
        """Like `run`, for somebody whose patience ends: then, or at once, the run is left in the background.

        The fresh sandbox of a run that is left in the background stays.
        """
        settings = self.settings
        checked = check(request, settings, settings.runs.max_timeout_s if background else settings.runs.timeout_s)
        until = checked.asked_at + (0 if background else settings.runs.foreground_s)
        return await self._run(request, checked, until, report)

    async def read_output(
        self, owner: str, sandbox_id: str, run_id: str, *, offset: int, wait_s: float, report: Report | None = None
    ) -> RunProgress:
        """What a run has written from `offset` on, and its result if it is over, or why there is none.

        Raises:
            SandboxNotFound, RunNotFound, MachineLost: as their names say.
        """
        if (grave := self._graves.find(owner, sandbox_id)) is not None:
            return lost_view(grave, run_id, self.settings, offset)
        box = self._find(owner, sandbox_id)
        if box.ending is not None:
            return lost_view(box.ending, run_id, self.settings, offset)
        box.touch()
        return await read_on(box, run_id, self.settings, offset, wait_s, report)

    async def stop_run(self, owner: str, sandbox_id: str, run_id: str) -> RunView:
        """End a run, and return what came of it.

        Raises:
            SandboxNotFound, RunNotFound, MachineLost: as their names say.
        """
        box = self._find(owner, sandbox_id)
        box.touch()
        return await stop(box, run_id)

    async def _run(
        self, request: RunRequest, checked: CheckedRun, until: float, report: Report | None
    ) -> RunView | RunProgress:
        self._check_runs(request.owner)  # before a machine is taken
        if request.sandbox_id is not None:
            box = self._find(request.owner, request.sandbox_id)
            if (lease := box.lease or box.last_lease) is not None:
                check_options(request, lease.template)
            return await self._run_in(box, checked, until, report)
        check_options(request, find_template(self._catalogue, request.template or self.settings.template))
        try:
            return await self._run_once(request, checked, until, report)
        except RunNotStarted:  # its machine was dead already, as one that had been kept ready may be
            return await self._run_once(request, checked, until, report)

    async def _run_once(
        self, request: RunRequest, checked: CheckedRun, until: float, report: Report | None
    ) -> RunView | RunProgress:
        box = await self._start(request.owner, request.template, lifespan(self.settings, None, None), one_off=True)
        try:
            return await self._run_in(box, checked, until, report)
        finally:
            if box.one_off:
                box.end(End.CLOSED)  # its keeper cleans up, the caller need not wait

    async def _run_in(
        self, box: Sandbox, checked: CheckedRun, until: float, report: Report | None
    ) -> RunView | RunProgress:
        self._check_runs(box.owner)
        return await run_in_turn(box, checked, self.settings, until, report)

    def _check_runs(self, owner: str) -> None:
        limit = self.settings.limits.owner_runs
        running = sum(box.owner == owner and box.runs.current is not None for box in self._alive.values())
        if limit is not None and running >= limit:
            self._watcher.refused("limits.owner_runs")
            raise RunLimit("limits.owner_runs", limit)

    # -- files ---------------------------------------------------------------------------------------------

    async def read(self, owner: str, sandbox_id: str, path: str, *, offset: int = 0, limit: int) -> FileChunk:
        """A part of a file."""
        where = resolve(path)
        async with self._find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                return await lease.agent.read(where, offset=offset, limit=limit)

    async def read_all(self, owner: str, sandbox_id: str, path: str, *, max_bytes: int | None = None) -> bytes:
        """A whole file, up to `max_bytes` or the limit of the settings."""
        limit = self.settings.files.max_read_bytes if max_bytes is None else max_bytes
        async with self._find(owner, sandbox_id).use() as lease:
            return await read_all(lease.agent, resolve(path), limit)

    async def write(self, owner: str, sandbox_id: str, path: str, data: bytes) -> WrittenFile:
        """Create or replace a file, atomically."""
        where = resolve(path)
        limit = self.settings.files.max_write_bytes
        if len(data) > limit:
            raise FileTooLarge(where, len(data), limit)
        async with self._find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                info = await lease.agent.write(where, data)
        return WrittenFile(path=info.path, size=info.size)

    async def list_files(self, owner: str, sandbox_id: str, path: str, *, recursive: bool) -> FileList:
        """What is in a directory."""
        where = resolve(path)
        async with self._find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                limit = self.settings.files.max_entries
                listing = await lease.agent.list(where, recursive=recursive, max_entries=limit)
        entries = [FileView(path=entry.path, kind=entry.kind, size=entry.size) for entry in listing.entries]
        return FileList(path=where, entries=entries, truncated=listing.truncated)

    async def artifacts(self, owner: str, sandbox_id: str) -> ArtifactList:
        """Return the files in the outputs directory."""
        listing = await self.list_files(owner, sandbox_id, OUTPUTS, recursive=True)
        artifacts = [
            ArtifactView(
                path=entry.path, size=entry.size, mime_type=mime_of(entry.path), uri=file_uri(sandbox_id, entry.path)
            )
            for entry in listing.entries
            if entry.kind == "file"
        ]
        return ArtifactList(artifacts=artifacts, truncated=listing.truncated)
