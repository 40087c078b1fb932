"""The one place that knows all sandboxes: owners, limits, deadlines and results."""

import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from guest.client.messages import FileChunk, FileInfo, Listing
from guest.places import OUTPUTS
from mcp_sandbox.admission import Admission, Limits, Ticket
from mcp_sandbox.calls import Report, between_runs, check_free, lost_view, read_on, run_in_turn, stop
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest, LimitReached, NotFound, NotSent, UnknownTemplate
from mcp_sandbox.execute import CheckedRun, check
from mcp_sandbox.files import file_operation, read_all, resolve
from mcp_sandbox.graves import Graves
from mcp_sandbox.lifecycle import ALIVE, OVER, End, Lifespan, State, lifespan
from mcp_sandbox.provider import Frozen, HostFacts, Lease, LeaseTimings, Provider
from mcp_sandbox.running import RunBook, RunView
from mcp_sandbox.runs import RunRequest, RunResult
from mcp_sandbox.sandbox import Sandbox, Watcher
from templates.errors import UnknownTemplate as NoSuchTemplate
from templates.model import Template, find_templates, load_template

MAX_COPIES = 8  # of one fork


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """What an owner may know about a sandbox."""

    id: str
    template: Template
    state: State
    run_id: str | None  # the run that is on
    age_s: float
    expires_in_s: float  # if it is not used
    ends_in_s: float  # in any case
    facts: HostFacts
    timings: LeaseTimings


class SandboxService:
    """Sandboxes of many owners over one provider. Leaving it ends all of them."""

    def __init__(self, provider: Provider, settings: Settings, watcher: Watcher | None = None) -> None:
        self.settings = settings
        self._watcher = watcher or Watcher()
        self.admission = Admission(Limits.of(settings), settings.queue_timeout_s)
        self._provider = provider
        self._alive: dict[str, Sandbox] = {}
        self._graves = Graves()
        self._pauses: Counter[str] = Counter()  # frozen states of each owner
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        for box in self._alive.values():
            box.end(End.CLOSED, "the server stopped")
        return await self._tasks.__aexit__(kind, error, trace)

    # -- sandboxes -----------------------------------------------------------------------------------------

    async def create(
        self, owner: str, template: str | None = None, *, ttl_s: float | None = None, idle_s: float | None = None
    ) -> SandboxInfo:
        """A new sandbox, ready to use.

        Raises:
            BadRequest, LimitReached, TemplateNotBuilt, UnknownTemplate, HostNotReady, SandboxError: there is none.
        """
        return self._info(await self._start(owner, template, lifespan(self.settings, ttl_s, idle_s), one_off=False))

    def sandboxes(self, owner: str) -> list[SandboxInfo]:
        """The owner's sandboxes, oldest first."""
        return [self._info(box) for box in self._alive.values() if box.owner == owner and box.state in ALIVE]

    def alive(self) -> list[Sandbox]:
        """All sandboxes, whoever owns them, oldest first: for operators, not for callers."""
        return list(self._alive.values())

    async def close(self, owner: str, sandbox_id: str) -> bool:
        """End a sandbox and wait until nothing of it is left; False if it had ended before.

        Raises:
            NotFound: the owner never had such a sandbox.
        """
        if self._graves.find(owner, sandbox_id) is not None:
            return False
        return await self._find(owner, sandbox_id).close()

    async def _start(self, owner: str, template: str | None, span: Lifespan, *, one_off: bool) -> Sandbox:
        name = template or self.settings.template
        ticket = Ticket(owner, _memory_mb(name), passing=one_off)
        box = self._open(name, span, ticket, self._placed(ticket, self._provider.acquire(name)), one_off=one_off)
        with _all_or_none([box]):
            await _all_ready([box])
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
        runs = RunBook(self.settings.kept_runs, self.settings.kept_run_bytes)
        box = Sandbox(
            f"sb-{secrets.token_hex(8)}", template, span, ticket, runs, source, one_off=one_off, watcher=self._watcher
        )
        self._alive[box.id] = box
        self._tasks.start_soon(self._keep, box, name=f"keeper of {box.id}")
        return box

    async def _keep(self, box: Sandbox) -> None:
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
            raise NotFound(sandbox_id)
        return box

    def _info(self, box: Sandbox) -> SandboxInfo:
        lease = box.last_lease
        if lease is None:
            raise box.error()
        now = anyio.current_time()
        return SandboxInfo(
            id=box.id,
            template=lease.template,
            state=box.state,
            run_id=None if box.runs.current is None else box.runs.current.id,
            age_s=now - box.created,
            expires_in_s=box.expires_in_s(),
            ends_in_s=max(0.0, box.created + box.lifespan.ttl_s - now),
            facts=lease.facts,
            timings=lease.timings,
        )

    # -- forks and pauses ----------------------------------------------------------------------------------

    async def fork(self, owner: str, sandbox_id: str, count: int) -> list[SandboxInfo]:
        """Copies of a sandbox as it is now, each with a life of its own; the sandbox itself goes on. All or none.

        Raises:
            BadRequest, NotFound, Busy, Paused, CannotFreeze, LimitReached, SandboxError: there are none.
        """
        if not 1 <= count <= MAX_COPIES:
            raise BadRequest(f"count must be at least 1 and at most {MAX_COPIES}.")
        box = self._find(owner, sandbox_id)
        check_free(box)  # before anything is said about places
        copies: list[Sandbox] = []
        with _all_or_none(copies):
            async with AsyncExitStack() as stack:
                tickets = [Ticket(owner, box.ticket.memory_mb) for _ in range(count)]
                places = await stack.enter_async_context(self.admission.places(*tickets))
                async with between_runs(box), box.use_alone() as lease:
                    frozen = await stack.enter_async_context(self._provider.freeze(lease))
                for ticket, place in zip(tickets, places, strict=True):
                    copies.append(self._open(box.template, box.lifespan, ticket, self._copy(place, frozen)))
                await _all_ready(copies)
            await _all_ready(copies)  # removing the state took a while
            return [self._info(copy) for copy in copies]

    async def pause(self, owner: str, sandbox_id: str) -> SandboxInfo:
        """Freeze a sandbox and give its machine's memory back to the host. Only its time to live goes on.

        Raises:
            NotFound, Busy, CannotFreeze, LimitReached, SandboxError: it is as it was, or over.
        """
        box = self._find(owner, sandbox_id)
        async with between_runs(box):
            if box.frozen is None:
                await box.pause(partial(self._paused, owner))
        return self._info(box)

    async def resume(self, owner: str, sandbox_id: str) -> SandboxInfo:
        """Let a paused sandbox go on, when there is a place for its machine.

        Raises:
            NotFound, MachineLost, LimitReached, SandboxError: it is paused as before, or over.
        """
        box = self._find(owner, sandbox_id)
        if box.frozen is not None:
            async with between_runs(box):
                if box.frozen is not None:  # nobody else was quicker
                    thawed = self._provider.thaw(box.frozen, copy=False)
                    await box.resume(self._placed(box.ticket, thawed))
        box.touch()
        return self._info(box)

    @asynccontextmanager
    async def _copy(self, place: AsyncExitStack, frozen: Frozen) -> AsyncIterator[Lease]:
        async with place.pop_all(), self._provider.thaw(frozen, copy=True) as lease:
            yield lease

    @asynccontextmanager
    async def _paused(self, owner: str, lease: Lease) -> AsyncIterator[Frozen]:
        """A frozen state that is counted: it takes no memory, but the disk is not endless."""
        limits = self.settings
        for setting, limit, used in (
            ("max_owner_paused", limits.max_owner_paused, self._pauses[owner]),
            ("max_paused", limits.max_paused, self._pauses.total()),
        ):
            if limit is not None and used >= limit:
                advice = "Resume or close a paused sandbox (list_sandboxes names them)."
                raise LimitReached(setting, limit, advice if self._pauses[owner] else "Try again later.")
        self._pauses[owner] += 1
        try:
            async with self._provider.freeze(lease) as frozen:
                yield frozen
        finally:
            self._pauses[owner] -= 1

    # -- runs ----------------------------------------------------------------------------------------------

    async def run(self, request: RunRequest) -> RunResult:
        """Run code in the sandbox the request names, or in a fresh one that is destroyed afterwards.

        Code that fails is a result. An exception says that there is none.

        Raises:
            BadRequest, NotFound, Busy, MachineLost, LimitReached, TemplateNotBuilt: as their names say.
        """
        checked = check(request, self.settings, self.settings.run_timeout_s)
        result = await self._run(request, checked, math.inf, None)
        assert isinstance(result, RunResult), "whoever waits for ever gets a result"
        return result

    async def run_for_client(
        self, request: RunRequest, *, background: bool = False, report: Report | None = None
    ) -> RunResult | RunView:
        """Like `run`, for somebody whose patience ends: then, or at once, the run is left in the background.

        The fresh sandbox of a run that is left in the background stays.
        """
        settings = self.settings
        checked = check(request, settings, settings.max_run_timeout_s if background else settings.run_timeout_s)
        until = checked.asked_at + (0 if background else settings.foreground_s)
        return await self._run(request, checked, until, report)

    async def read_output(
        self, owner: str, sandbox_id: str, run_id: str, *, offset: int, wait_s: float, report: Report | None = None
    ) -> RunView:
        """What a run has written from `offset` on, and its result if it is over, or why there is none.

        Raises:
            NotFound, RunNotFound, MachineLost: as their names say.
        """
        if (grave := self._graves.find(owner, sandbox_id)) is not None:
            return lost_view(grave, run_id, self.settings, offset)
        box = self._find(owner, sandbox_id)
        if box.ending is not None:
            return lost_view(box.ending, run_id, self.settings, offset)
        box.touch()
        return await read_on(box, run_id, self.settings, offset, wait_s, report)

    async def stop_run(self, owner: str, sandbox_id: str, run_id: str) -> RunResult:
        """End a run, and return what came of it.

        Raises:
            NotFound, RunNotFound, MachineLost: as their names say.
        """
        box = self._find(owner, sandbox_id)
        box.touch()
        return await stop(box, run_id)

    async def _run(
        self, request: RunRequest, checked: CheckedRun, until: float, report: Report | None
    ) -> RunResult | RunView:
        self._check_runs(request.owner)  # before a machine is taken
        if request.sandbox_id is not None:
            return await self._run_in(self._find(request.owner, request.sandbox_id), checked, until, report)
        try:
            return await self._run_once(request, checked, until, report)
        except NotSent:  # its machine was dead already, as one that had been kept ready may be
            return await self._run_once(request, checked, until, report)

    async def _run_once(
        self, request: RunRequest, checked: CheckedRun, until: float, report: Report | None
    ) -> RunResult | RunView:
        box = await self._start(request.owner, request.template, lifespan(self.settings, None, None), one_off=True)
        try:
            return await self._run_in(box, checked, until, report)
        finally:
            if box.one_off:
                box.end(End.CLOSED)  # its keeper cleans up, the caller need not wait

    async def _run_in(
        self, box: Sandbox, checked: CheckedRun, until: float, report: Report | None
    ) -> RunResult | RunView:
        self._check_runs(box.owner)
        return await run_in_turn(box, checked, self.settings, until, report)

    def _check_runs(self, owner: str) -> None:
        limit = self.settings.max_owner_runs
        running = sum(box.owner == owner and box.runs.current is not None for box in self._alive.values())
        if limit is not None and running >= limit:
            raise LimitReached("max_owner_runs", limit, "Wait until a run has ended, or end one with stop_run.")

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


@contextmanager
def _all_or_none(boxes: list[Sandbox]) -> Iterator[None]:
    """End all of them if the block fails or is cancelled: the caller would never know their ids."""
    try:
        yield
    except BaseException:
        for box in boxes:
            box.end(End.CLOSED, "it was not made in the end")
        raise


async def _all_ready(boxes: list[Sandbox]) -> None:
    """Wait until all of them can be used, and somebody still wants them.

    Raises:
        SandboxError: one of them cannot be used; nothing is left of any.
    """
    for box in boxes:
        await box.settled.wait()
    await anyio.lowlevel.checkpoint_if_cancelled()  # both may have happened in the same moment
    failed = next((box for box in boxes if box.state in OVER), None)
    if failed is None:
        return
    for box in boxes:
        box.end(End.CLOSED, "another copy failed")
    for box in boxes:
        await box.ended.wait()
    raise failed.error()


def _memory_mb(template: str) -> int:
    """How much memory a machine of `template` has."""
    try:
        return load_template(template).machine.memory_mb
    except NoSuchTemplate:
        raise UnknownTemplate(template, sorted(find_templates())) from None
