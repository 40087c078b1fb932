"""What every face calls: finds the owner's sandbox, checks the request and delegates."""

import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NoReturn, Self

from anyio import AsyncContextManagerMixin
from anyio.abc import ByteStream

from guest.client.messages import FileChunk, Listing
from guest.client.terminals import Size, Terminal
from guest.client.wire import one_line
from guest.errors import RequestRefused
from guest.places import OUTPUTS
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import (
    FileTooLarge,
    HostNotReady,
    PortRefused,
    RunLimit,
    RunNotStarted,
    SandboxNotFound,
    TerminalClosed,
    TerminalRefused,
)
from mcp_sandbox.machines.provider import Provider, find_template
from mcp_sandbox.runs.requests import CheckedRun, RunRequest, check_request
from mcp_sandbox.sandboxes.admission import NO_QUOTA, Admission, Quota, owner_limit
from mcp_sandbox.sandboxes.archives import pack, unpack
from mcp_sandbox.sandboxes.file_access import (
    MAX_REASON_CHARS,
    artifact_view,
    file_operation,
    read_all,
    resolve,
    write_parts,
)
from mcp_sandbox.sandboxes.forks import Forks
from mcp_sandbox.sandboxes.lifecycle import ALIVE, End, State, lifespan
from mcp_sandbox.sandboxes.missing_modules import with_missing_module
from mcp_sandbox.sandboxes.networks import Networks
from mcp_sandbox.sandboxes.roster import Roster
from mcp_sandbox.sandboxes.run_calls import Report, lost_view, read_output, run_and_wait, stop_run, write_stdin
from mcp_sandbox.sandboxes.sandbox import Observer, Sandbox
from mcp_sandbox.sandboxes.sizes import size_within
from mcp_sandbox.sandboxes.view import view_of
from mcp_sandbox.views import (
    ArtifactList,
    FileList,
    FileView,
    PageView,
    RunProgress,
    RunView,
    SandboxList,
    SandboxView,
    SentInput,
    TemplateView,
    UnpackedArchive,
    WrittenFile,
    first_page,
)
from mcp_sandbox.views.sandboxes import Reseed
from mcp_sandbox.web.fetching import FetchRequest, file_name
from mcp_sandbox.web.web import Web
from vmm.types import NetworkMode

DOWNLOADS = "downloads"  # in the workspace of a sandbox


class SandboxService(AsyncContextManagerMixin):
    """Sandboxes of many owners over one provider. Leaving it ends all of them."""

    def __init__(
        self,
        provider: Provider,
        settings: Settings,
        observer: Observer | None = None,
        networks: Networks | None = None,
        web: Web | None = None,
        current_quota: Callable[[], Quota] = lambda: NO_QUOTA,
    ) -> None:
        self.settings = settings
        self._web = web
        self._observer = observer or Observer()
        self._networks = networks or Networks(settings, self._observer.network_accessed)
        self._roster = Roster(provider, settings, self._observer, self._networks, current_quota)
        self._forks = Forks(provider, self._roster, settings.limits)
        self._catalogue = settings.catalogue

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        async with self._roster:
            yield self

    @property
    def admission(self) -> Admission:
        """The queue for places within the limits."""
        return self._roster.admission

    @property
    def web(self) -> Web:
        """What reaches the web for callers. Raises HostNotReady if nothing does."""
        if self._web is None:
            raise HostNotReady("this server has no access to the web")
        return self._web

    async def fetch(self, owner: str, request: FetchRequest, sandbox_id: str | None) -> tuple[PageView, bytes]:
        """Fetch a part of a page; with the id of a sandbox, save the whole download there, too.

        Raises:
            BadRequest, FetchError, SandboxNotFound, FileError, SandboxError: as their names say.
        """
        if sandbox_id is None:
            return await self.web.fetch(owner, request)
        self._roster.find(owner, sandbox_id)  # before anything is downloaded
        view, data = await self.web.fetch(owner, replace(request, keep=True))
        written = await self.write(owner, sandbox_id, f"{DOWNLOADS}/{file_name(view)}", data)
        return view.model_copy(update={"saved": written}), data

    # -- sandboxes -----------------------------------------------------------------------------------------

    async def create(
        self,
        owner: str,
        template: str | None = None,
        *,
        ttl_s: float | None = None,
        idle_s: float | None = None,
        memory_mb: int | None = None,
        cpus: int | None = None,
        network: NetworkMode = NetworkMode.NONE,
        allow_domains: Sequence[str] | None = None,
    ) -> SandboxView:
        """Create a sandbox and wait until it is ready. With `allow_domains`, it may reach only these.

        Its memory and CPUs are the template's, unless they are given.

        Raises:
            BadRequest, LimitReached, NetworkRefused, TemplateNotBuilt, UnknownTemplate, UnusableTemplate, HostNotReady,
            SandboxError: there is none.
        """
        span = lifespan(self.settings.lifetime, ttl_s, idle_s)
        definition = find_template(self._catalogue, template or self.settings.template)
        grant = self._networks.grant(definition, network, allow_domains)
        size = size_within(self.settings.limits, definition.machine, memory_mb, cpus)
        return view_of(await self._roster.open(owner, template, span, one_off=False, grant=grant, size=size))

    def sandboxes(self, owner: str) -> list[SandboxView]:
        """Return the owner's sandboxes, oldest first."""
        return [view_of(box) for box in self._roster.of(owner) if box.state in ALIVE]

    def list_sandboxes(self, owner: str, *, offset: int = 0) -> SandboxList:
        """List a page of the owner's sandboxes, from the one with the number `offset` on."""
        alive = self.sandboxes(owner)[offset:]
        page = first_page(alive, self.settings.output.page_bytes)
        return SandboxList(
            sandboxes=page,
            max_sandboxes=self.settings.limits.sandboxes,
            next_offset=offset + len(page) if len(page) < len(alive) else None,
        )

    def get(self, owner: str, sandbox_id: str) -> SandboxView:
        """Return a live sandbox.

        Raises:
            SandboxNotFound, MachineLost: as their names say.
        """
        box = self._roster.find(owner, sandbox_id)
        if box.state is State.CREATING:  # its id is not known to its owner yet
            raise SandboxNotFound(sandbox_id)
        if box.state not in ALIVE:
            raise box.error()
        return view_of(box)

    def alive(self) -> list[Sandbox]:
        """Return the sandboxes of all owners, oldest first. For operators only."""
        return self._roster.all()

    async def runs_ended(self) -> None:
        """Return when no run of any owner is active."""
        while active := [run for box in self._roster.all() for run in box.runs.active.values()]:
            await active[0].done.wait()

    async def close(self, owner: str, sandbox_id: str) -> bool:
        """End a sandbox and wait until nothing of it is left; False if it had ended before.

        Raises:
            SandboxNotFound: the owner never had such a sandbox.
        """
        if self._roster.ending(owner, sandbox_id) is not None:
            return False
        return await self._roster.find(owner, sandbox_id).close()

    # -- forks and pauses ----------------------------------------------------------------------------------

    async def fork(self, owner: str, sandbox_id: str, count: int, reseed: Reseed = "global") -> list[SandboxView]:
        """Copy a sandbox as it is now, `count` times or not at all. The sandbox itself goes on.

        Raises:
            BadRequest, SandboxNotFound, SandboxBusy, SandboxPaused, CannotFreeze, LimitReached, SandboxError:
                nothing was copied.
        """
        return [view_of(copy) for copy in await self._forks.fork(self._roster.find(owner, sandbox_id), count, reseed)]

    async def pause(self, owner: str, sandbox_id: str) -> SandboxView:
        """Freeze a sandbox and give its memory back to the host. Its idle timeout stops, its maximum age does not.

        Raises:
            SandboxNotFound, SandboxBusy, CannotFreeze, LimitReached, SandboxError: it is as it was, or over.
        """
        box = self._roster.find(owner, sandbox_id)
        await self._forks.pause(box)
        return view_of(box)

    async def resume(self, owner: str, sandbox_id: str) -> SandboxView:
        """Continue a paused sandbox once there is a place for its machine.

        Raises:
            SandboxNotFound, MachineLost, LimitReached, SandboxError: it is still paused, or over.
        """
        box = self._roster.find(owner, sandbox_id)
        await self._forks.resume(box)
        return view_of(box)

    # -- runs ----------------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> RunView:
        """Run code in the sandbox that the request names, or in a fresh one that is destroyed afterwards.

        Code that fails is a result. An exception means that there is no result.

        Raises:
            BadRequest, SandboxNotFound, SandboxBusy, MachineLost, LimitReached, TemplateNotBuilt: as their names say.
        """
        checked = check_request(request, self.settings.runs, self.settings.runs.timeout_s)
        result = await self._run(checked, math.inf, None)
        assert isinstance(result, RunView), "a call that waits forever gets a result"
        return result

    async def run_for_client(
        self, request: RunRequest, *, background: bool = False, report: Report | None = None
    ) -> RunView | RunProgress:
        """Like `run`, but leave the run in the background at once, or when it takes longer than clients wait.

        The fresh sandbox of a run that is left in the background stays.
        """
        limits = self.settings.runs
        background |= request.stdin_open  # its input needs a run_id
        checked = check_request(request, limits, limits.max_timeout_s if background else limits.timeout_s)
        until = checked.asked_at + (0 if background else limits.foreground_s)
        return await self._run(checked, until, report)

    async def read_output(
        self,
        owner: str,
        sandbox_id: str,
        run_id: str,
        *,
        offset: int,
        wait_s: float,
        report: Report | None = None,
        full_page: bool = True,
    ) -> RunProgress:
        """Return a run's output from `offset` on, and its result if it is over, or why there is none.

        It waits up to `wait_s` until the run is over or there is a page of output, or any output without `full_page`.

        Raises:
            SandboxNotFound, RunNotFound, MachineLost: as their names say.
        """
        output = self.settings.output
        if (ending := self._roster.ending(owner, sandbox_id)) is not None:
            return lost_view(ending, run_id, output, offset)
        box = self._roster.find(owner, sandbox_id)
        if box.ending is not None:
            return lost_view(box.ending, run_id, output, offset)
        box.touch()
        progress = await read_output(box, run_id, output, offset, wait_s, report, full_page=full_page)
        return with_missing_module(progress, box.template, self._catalogue)

    async def stop_run(self, owner: str, sandbox_id: str, run_id: str) -> RunView:
        """Stop a run and return its result.

        Raises:
            SandboxNotFound, RunNotFound, MachineLost: as their names say.
        """
        box = self._roster.find(owner, sandbox_id)
        box.touch()
        return with_missing_module(await stop_run(box, run_id), box.template, self._catalogue)

    async def write_stdin(
        self, owner: str, sandbox_id: str, run_id: str, data: bytes, *, close: bool = False
    ) -> SentInput:
        """Send input to a run that was started with `stdin_open`, and with `close` tell it that no more comes.

        Raises:
            SandboxNotFound, RunNotFound, StdinClosed, StdinFull, MachineLost: as their names say.
        """
        box = self._roster.find(owner, sandbox_id)
        box.touch()
        return await write_stdin(box, run_id, data, close=close)

    async def _run(self, run: CheckedRun, until: float, report: Report | None) -> RunView | RunProgress:
        request = run.request
        self._check_run_limit(request.owner)  # before a machine is taken
        if request.sandbox_id is not None:
            box = self._roster.find(request.owner, request.sandbox_id)
            if (lease := box.last_lease) is not None:
                request.check_template(lease.template)
            return await self._run_in(box, run, until, report)
        request.check_template(find_template(self._catalogue, request.template or self.settings.template))
        try:
            return await self._run_once(run, until, report)
        except RunNotStarted:  # a pooled machine may have died while it waited
            return await self._run_once(run, until, report)

    async def _run_once(self, run: CheckedRun, until: float, report: Report | None) -> RunView | RunProgress:
        span = lifespan(self.settings.lifetime, None, None)
        box = await self._roster.open(run.request.owner, run.request.template, span, one_off=True)
        try:
            return await self._run_in(box, run, until, report)
        finally:
            if box.one_off:
                box.end(End.CLOSED)  # its keeper tears it down while the caller already has the result

    async def _run_in(
        self, box: Sandbox, run: CheckedRun, until: float, report: Report | None
    ) -> RunView | RunProgress:
        result = await run_and_wait(box, run, self.settings.output, until, report, self._admit)
        return with_missing_module(result, box.template, self._catalogue)

    def _admit(self, box: Sandbox) -> None:
        """Raise RunLimit if no other run may start in the sandbox now."""
        self._check_run_limit(box.owner)
        if len(box.runs.active) >= (limit := self.settings.runs.concurrent):
            self._refuse_run("runs.concurrent", limit)

    def _check_run_limit(self, owner: str) -> None:
        setting, limit = owner_limit("runs", self._roster.current_quota().runs, self.settings.limits.owner_runs)
        if limit is not None and sum(len(box.runs.active) for box in self._roster.of(owner)) >= limit:
            self._refuse_run(setting, limit)

    def _refuse_run(self, setting: str, limit: int) -> NoReturn:
        self._observer.limit_refused(setting)
        raise RunLimit(setting, limit)

    @asynccontextmanager
    async def terminal(self, owner: str, sandbox_id: str, size: Size, term: str) -> AsyncIterator[Terminal]:
        """Open a terminal with a shell, beside runs. The sandbox is in use meanwhile.

        Raises:
            SandboxNotFound, TerminalRefused, TerminalClosed, SandboxError: there is none, or no longer.
        """
        async with self._roster.find(owner, sandbox_id).use_for_terminal() as lease:
            try:
                async with lease.agent.terminal(size, term) as terminal:
                    yield terminal
            except RequestRefused as refusal:
                raise TerminalRefused(sandbox_id, one_line(refusal.message, MAX_REASON_CHARS)) from refusal

    @asynccontextmanager
    async def connect(self, owner: str, sandbox_id: str, port: int) -> AsyncIterator[ByteStream]:
        """Connect to a port on the loopback of a sandbox, in every network mode. The sandbox is in use meanwhile.

        Raises:
            SandboxNotFound, PortRefused, SandboxError: there is no connection, or no longer.
        """
        box = self._roster.find(owner, sandbox_id)
        try:
            async with box.use_for_terminal() as lease, lease.agent.connect(port) as stream:
                yield stream
        except RequestRefused as refusal:
            raise PortRefused(sandbox_id, port, one_line(refusal.message, MAX_REASON_CHARS)) from refusal
        except TerminalClosed as closed:
            raise PortRefused(sandbox_id, port, "the sandbox was forked or paused") from closed

    # -- files ---------------------------------------------------------------------------------------------

    async def read(self, owner: str, sandbox_id: str, path: str, *, offset: int = 0, limit: int) -> FileChunk:
        """Read a part of a file."""
        where = resolve(path)
        async with self._roster.find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                return await lease.agent.read(where, offset=offset, limit=limit)

    async def read_all(self, owner: str, sandbox_id: str, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole file, up to `max_bytes` or the limit in the settings."""
        limit = self.settings.files.max_read_bytes if max_bytes is None else max_bytes
        async with self._roster.find(owner, sandbox_id).use() as lease:
            return await read_all(lease.agent, resolve(path), limit)

    async def write(self, owner: str, sandbox_id: str, path: str, data: bytes, *, append: bool = False) -> WrittenFile:
        """Create or replace a file, or append to it, atomically."""
        where = resolve(path)
        limit = self.settings.files.max_write_bytes
        if len(data) > limit:
            raise FileTooLarge(where, len(data), limit)
        async with self._roster.find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                info = await lease.agent.write(where, data, append=append)
        return WrittenFile(path=info.path, size=info.size)

    async def write_parts(self, owner: str, sandbox_id: str, path: str, parts: AsyncIterable[bytes]) -> WrittenFile:
        """Create or replace a file of any size, atomically, from parts as they arrive. The sandbox's disk limits it."""
        where = resolve(path)
        async with self._roster.find(owner, sandbox_id).use() as lease:
            info = await write_parts(lease.agent, where, parts)
        return WrittenFile(path=info.path, size=info.size)

    def pack(self, owner: str, sandbox_id: str, path: str) -> AsyncGenerator[bytes]:
        """Return a directory as the parts of a tar archive. Links, and files that cannot be read, are left out."""
        return pack(self._roster.find(owner, sandbox_id), resolve(path))

    async def unpack(self, owner: str, sandbox_id: str, path: str, parts: AsyncIterable[bytes]) -> UnpackedArchive:
        """Unpack a tar archive into a directory, from parts as they arrive."""
        return await unpack(self._roster.find(owner, sandbox_id), resolve(path), parts)

    async def list_files(self, owner: str, sandbox_id: str, path: str, *, recursive: bool, offset: int = 0) -> FileList:
        """List a page of a directory, from the entry number `offset` on."""
        where = resolve(path)
        listing = await self._list(owner, sandbox_id, where, offset, recursive=recursive)
        views = (FileView(path=entry.path, kind=entry.kind, size=entry.size) for entry in listing.entries)
        page = first_page(views, self.settings.output.page_bytes)
        next_offset = _next_offset(listing, offset, len(page))
        return FileList(
            path=where, entries=page, truncated=listing.truncated or next_offset is not None, next_offset=next_offset
        )

    async def artifacts(self, owner: str, sandbox_id: str, *, offset: int = 0) -> ArtifactList:
        """List a page of the files that runs left in the outputs directory. Directories count in `offset`."""
        listing = await self._list(owner, sandbox_id, OUTPUTS, offset, recursive=True)
        files = [(number, entry) for number, entry in enumerate(listing.entries) if entry.kind == "file"]
        views = (artifact_view(entry.path, entry.size, sandbox_id) for _, entry in files)
        page = first_page(views, self.settings.output.page_bytes)
        used = files[len(page)][0] if len(page) < len(files) else len(listing.entries)
        next_offset = _next_offset(listing, offset, used)
        return ArtifactList(
            artifacts=page, truncated=listing.truncated or next_offset is not None, next_offset=next_offset
        )

    # -- templates -----------------------------------------------------------------------------------------

    def templates(self) -> list[TemplateView]:
        """Return the templates that sandboxes can be created from, by name, without where they are on the host."""
        return [
            TemplateView(
                name=name,
                title=template.title,
                description=template.description,
                language=template.language,
                memory_mb=template.machine.memory_mb,
                vcpus=template.machine.vcpus,
                disk_mb=template.machine.disk_mb,
                packages=list(template.packages),
            )
            for name, template in self._catalogue.templates().items()
        ]

    async def _list(self, owner: str, sandbox_id: str, where: str, offset: int, *, recursive: bool) -> Listing:
        async with self._roster.find(owner, sandbox_id).use() as lease:
            with file_operation(where):
                limit = self.settings.files.max_entries
                return await lease.agent.list(where, recursive=recursive, max_entries=limit, skip=offset)


def _next_offset(listing: Listing, offset: int, used: int) -> int | None:
    """Return where the next page begins if `used` entries of a listing fit into this one."""
    more = listing.truncated or used < len(listing.entries)
    return offset + used if more and used else None
