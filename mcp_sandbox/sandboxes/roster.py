"""The sandboxes that are opening, alive or recently ended."""

import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Self

import anyio
import anyio.abc
import anyio.lowlevel
from anyio import AsyncContextManagerMixin

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxNotFound
from mcp_sandbox.machines.provider import Lease, MachineRequest, Provider, find_template
from mcp_sandbox.runs.running import RunHistory
from mcp_sandbox.sandboxes.admission import NO_QUOTA, Admission, Limits, Quota, Ticket
from mcp_sandbox.sandboxes.keeper import Keeper
from mcp_sandbox.sandboxes.lifecycle import OVER, End, Ending, Lifespan
from mcp_sandbox.sandboxes.machine_slot import MachineSource
from mcp_sandbox.sandboxes.networks import OFFLINE, Grant, Network, Networks
from mcp_sandbox.sandboxes.sandbox import Observer, Sandbox
from templates.model import MachineSize

MAX_ENDINGS = 256  # ended sandboxes whose end can still be explained
MAX_LOST_RUNS = 16  # of them that can still be read: a log takes up to a megabyte


class Endings:
    """How the last sandboxes ended, by id."""

    def __init__(self) -> None:
        self._endings: OrderedDict[str, Ending] = OrderedDict()

    def add(self, ending: Ending) -> None:
        """Remember an ending, unless the sandbox never started: then no owner knows its id."""
        if ending.end is End.FAILED:
            return
        self._endings[ending.sandbox_id] = ending
        if len(self._endings) > MAX_ENDINGS:
            self._endings.popitem(last=False)
        left = MAX_LOST_RUNS
        for newest in [ending for ending in reversed(self._endings.values()) if ending.lost_runs]:
            self._endings[newest.sandbox_id] = replace(newest, lost_runs=newest.lost_runs[:left])
            left -= min(left, len(newest.lost_runs))

    def find(self, owner: str, sandbox_id: str) -> Ending | None:
        """Return how the owner's sandbox ended, if that is still known."""
        ending = self._endings.get(sandbox_id)
        return ending if ending is not None and ending.owner == owner else None


class Roster(AsyncContextManagerMixin):
    """Opens sandboxes on places that admission grants, and knows them by owner and id. Leaving it ends all of them."""

    def __init__(
        self,
        provider: Provider,
        settings: Settings,
        observer: Observer,
        networks: Networks,
        current_quota: Callable[[], Quota] = lambda: NO_QUOTA,
    ) -> None:
        limits = Limits.of(settings.limits, provider.capacity.now)
        self.admission = Admission(limits, settings.limits.queue_timeout_s, observer.limit_refused)
        self._provider = provider
        self._settings = settings
        self._catalogue = settings.catalogue
        self._observer = observer
        self._networks = networks
        self.current_quota = current_quota  # of the request that this task serves
        self._alive: dict[str, Sandbox] = {}  # by id, oldest first; also those that are opening or closing
        self._endings = Endings()
        self._tasks: anyio.abc.TaskGroup

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        following = anyio.CancelScope()
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._follow_capacity, following, name="capacity of the hosts")
            try:
                yield self
            finally:
                for box in self._alive.values():
                    box.end(End.CLOSED, "the server stopped")
                following.cancel()

    async def _follow_capacity(self, scope: anyio.CancelScope) -> None:
        """Keep admission within the capacity of the provider's hosts."""
        with scope:
            async for capacity in self._provider.capacity:
                self.admission.resize(Limits.of(self._settings.limits, capacity))

    # -- finding -------------------------------------------------------------------------------------------

    def all(self) -> list[Sandbox]:
        """Return the sandboxes of all owners, oldest first."""
        return list(self._alive.values())

    def of(self, owner: str) -> list[Sandbox]:
        """Return the sandboxes of one owner, oldest first."""
        return [box for box in self._alive.values() if box.owner == owner]

    def find(self, owner: str, sandbox_id: str) -> Sandbox:
        """Return the owner's sandbox.

        Raises:
            SandboxNotFound, MachineLost: it ended, or the owner never had it.
        """
        if (ending := self._endings.find(owner, sandbox_id)) is not None:
            raise ending.error()
        box = self._alive.get(sandbox_id)
        if box is None or box.owner != owner:
            raise SandboxNotFound(sandbox_id)
        return box

    def ending(self, owner: str, sandbox_id: str) -> Ending | None:
        """Return how the owner's sandbox ended, if it did and that is still known."""
        return self._endings.find(owner, sandbox_id)

    # -- opening -------------------------------------------------------------------------------------------

    async def open(
        self,
        owner: str,
        template: str | None,
        span: Lifespan,
        *,
        one_off: bool,
        grant: Grant = OFFLINE,
        size: MachineSize | None = None,
    ) -> Sandbox:
        """Create a sandbox with its own machine, and wait until it is ready.

        Raises:
            SandboxError: there is none.
        """
        name = template or self._settings.template
        own = find_template(self._catalogue, name).machine
        ticket = Ticket(owner, (size or own).host_mb, short_lived=one_off, quota=self.current_quota())
        network = self.new_network(owner, grant)
        request = MachineRequest(
            name, owner, None if size == own else size, network=grant.mode, serve_stream=network.serve_stream
        )
        source = self.admitted(ticket, self._provider.acquire(request))
        box = self.add(name, span, ticket, source, network, one_off=one_off)
        with all_or_none([box]):
            await all_ready([box])
        return box

    def new_network(self, owner: str, grant: Grant) -> Network:
        """Return the network of a new sandbox, which gets its id with it."""
        return self._networks.open(grant, owner, f"sb-{secrets.token_hex(8)}")

    def add(
        self,
        template: str,
        span: Lifespan,
        ticket: Ticket,
        source: MachineSource,
        network: Network,
        *,
        one_off: bool = False,
    ) -> Sandbox:
        """Add a sandbox that gets its machine from `source`. It is not ready yet."""
        box = Sandbox(
            network.sandbox_id,
            template,
            span,
            ticket,
            RunHistory(self._settings.runs.kept, self._settings.runs.kept_bytes),
            source,
            network,
            one_off=one_off,
            observer=self._observer,
            standstill_s=self._settings.lifetime.standstill_s,
        )
        self._alive[box.id] = box
        self._tasks.start_soon(self._keep, box, name=f"keeper of {box.id}")
        return box

    async def _keep(self, box: Sandbox) -> None:
        try:
            await Keeper(box).keep()
        finally:
            del self._alive[box.id]
            if box.ending is not None:
                self._endings.add(box.ending)

    @asynccontextmanager
    async def admitted(self, ticket: Ticket, source: MachineSource) -> AsyncIterator[Lease]:
        """Take a machine from `source` once admission has a place for it."""
        asked_at = anyio.current_time()
        async with self.admission.place(ticket):
            waited_s = anyio.current_time() - asked_at
            async with source as lease:
                timings = replace(lease.timings, queue_s=lease.timings.queue_s + waited_s)
                yield replace(lease, timings=timings)


@contextmanager
def all_or_none(boxes: list[Sandbox]) -> Iterator[None]:
    """End all sandboxes if the block fails or is cancelled: the caller would never learn their ids."""
    try:
        yield
    except BaseException:
        for box in boxes:
            box.end(End.CLOSED, "its creation was cancelled")
        raise


async def all_ready(boxes: list[Sandbox]) -> None:
    """Wait until all sandboxes are ready.

    Raises:
        SandboxError: one of them failed; all of them are gone.
    """
    for box in boxes:
        await box.settled.wait()
    await anyio.lowlevel.checkpoint_if_cancelled()  # the caller may have been cancelled in the same moment
    failed = next((box for box in boxes if box.state in OVER), None)
    if failed is None:
        return
    for box in boxes:
        box.end(End.CLOSED, "another copy failed")
    for box in boxes:
        await box.ended.wait()
    raise failed.error()
