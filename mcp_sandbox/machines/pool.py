"""A provider that keeps machines of another provider ready, so that a request seldom waits for a start."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from itertools import count
from typing import Protocol, Self

import anyio
import anyio.lowlevel

from guest.client.streams import ServeStream
from guest.errors import first_error
from mcp_sandbox.config import PoolSettings
from mcp_sandbox.errors import HostLost, SandboxError
from mcp_sandbox.machines.mapping import map_errors
from mcp_sandbox.machines.pool_plan import Plan, PoolLimits, make_plan
from mcp_sandbox.machines.pool_shelf import PooledMachine, PoolStats, Shelf
from mcp_sandbox.machines.provider import Frozen, Lease, MachineRequest, Provider, ProviderLayer, Supply
from mcp_sandbox.machines.unique import go_online
from templates.model import Template

FOLLOW_EVERY_S = 2.0  # how soon after a build its machines replace older ones, without any request
OTHERS_AFTER_S = 3.0  # a client's first requests come with the start, and need the CPU that other templates would take
REFILL_DELAY_S = 0.25  # starting a machine takes CPU: first let a request that got one return, and its first run

logger = logging.getLogger(__name__)


class Clock:
    """The host's clocks. Tests replace it."""

    def now(self) -> float:
        """Return the monotonic time."""
        return anyio.current_time()

    def wall(self) -> float:
        """Return the time of day, which can jump."""
        return time.time()

    async def wait(self, event: anyio.Event, until: float | None) -> None:
        """Return when `event` is set, at the latest at the time `until`."""
        with anyio.CancelScope(deadline=float("inf") if until is None else until):
            await event.wait()

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class OnRequest(Protocol):
    """Called for every request the pool could serve."""

    def __call__(self, template: str, /, *, hit: bool) -> None: ...


def _ignore(_template: str, *, hit: bool) -> None:
    """Ignore the event."""


def pool_limits(settings: PoolSettings, *, max_restores: int) -> PoolLimits:
    """Return the limits that the settings give a pool."""
    return PoolLimits(
        min_ready=settings.min,
        max_ready=settings.max,
        max_starting=max(1, max_restores // 2),  # leaves half of the starts to requests that miss
        memory_mb=settings.memory_mb,
        max_age_s=settings.max_age_s,
        idle_s=settings.idle_s,
    )


class Pool(ProviderLayer):
    """Keeps machines of one host ready, as many as the plan says. A ready machine stands still until it is leased.

    `supply` names the build that machines of `source` start from. A machine of an older build is replaced.
    Machines of the template `first` start with the pool, others a little later, unless they are asked for.

    Every machine has a task that enters and leaves the source's context. A context with a task group inside must be
    left by the task that entered it, and the caller that leases the machine runs in another task.
    """

    def __init__(
        self,
        source: Provider,
        supply: Supply,
        limits: PoolLimits,
        *,
        first: str | None = None,
        clock: Clock | None = None,
        on_request: OnRequest = _ignore,
    ) -> None:
        super().__init__(source)
        self._on_request = on_request
        self._limits = limits
        self._first = first
        self._clock = clock or Clock()
        self._supply = supply
        self._shelves: dict[str, Shelf] = {}
        self._on_demand = 0  # machines being started for a request
        self._numbers = count(1)
        self._wake = anyio.Event()  # set when the plan may have changed
        self._refill_at = 0.0  # no machine is started before, so that nothing disturbs the last request
        self._tasks = anyio.create_task_group()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        async with self._source, self._tasks:
            self._tasks.start_soon(self._keep_current, name="pool: follow builds")
            self._tasks.start_soon(self._keep_filled, name="pool: refill")
            try:
                yield self
            finally:
                for shelf in self._shelves.values():
                    shelf.ready.clear()  # these machines are about to end: lease none of them
                self._tasks.cancel_scope.cancel()

    def retire(self) -> None:
        """Keep no machine ready from now on. Called when the server ends, so that they end while sandboxes do."""
        self._limits = replace(self._limits, max_ready=0)
        self._wake.set()

    def stats(self) -> PoolStats:
        """Return what the pool holds and did."""
        return PoolStats({name: shelf.stats() for name, shelf in self._shelves.items()})

    def described(self) -> list[dict[str, object]]:
        """Return the same for operators, one entry per template."""
        return [{"template": name, **asdict(stats)} for name, stats in self.stats().templates.items()]

    # -- leasing -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        """Lease a machine that is ready, or else one of the source. Either way it ends with this context.

        Raises:
            SandboxError: the source has no machine. A failed refill raises nothing here.
        """
        version = await self._supply.version(request.template)
        await anyio.lowlevel.checkpoint_if_cancelled()  # the last await before the lease
        machine = self._take(request, version) or await self._next_started(request, version)
        if machine is None:
            async with self._start_now(request) as lease:
                yield lease
            return
        try:
            lease = machine.lease
            with map_errors():
                await lease.machine.resume()
                if request.serve_stream is not None:
                    lease = await go_online(lease, request.serve_stream)
            yield lease
        finally:
            machine.released.set()
            with anyio.CancelScope(shield=True):
                await machine.ended.wait()

    @asynccontextmanager
    async def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: ServeStream | None = None
    ) -> AsyncIterator[Lease]:
        """Lease a machine from the source: no pooled machine has that state."""
        async with AsyncExitStack() as stack:
            with self._starting_now():
                source = self._source.thaw(frozen, copy=copy, serve_stream=serve_stream)
                lease = await stack.enter_async_context(source)
            yield lease

    def _take(self, request: MachineRequest, version: str) -> PooledMachine | None:
        """Count the request, and take a machine that satisfies it."""
        shelf = self._shelf(request)
        if shelf is None:
            return None
        self._update(shelf, shelf.template, version)
        shelf.demand = shelf.demand.after_request(self._clock.now(), self._limits.max_ready)
        self._wake.set()
        machine = self._take_oldest(shelf, version)
        if machine is None:
            shelf.misses += 1
        else:
            shelf.hits += 1
        self._on_request(request.template, hit=machine is not None)
        return machine

    def _shelf(self, request: MachineRequest) -> Shelf | None:
        """Return the shelf whose machines satisfy the request, if there is one."""
        shelf = self._shelves.get(request.template)
        usable = shelf is not None and shelf.template.pool == "pooled" and request.is_standard(shelf.template)
        return shelf if usable else None

    def _take_oldest(self, shelf: Shelf, version: str) -> PooledMachine | None:
        """Take the oldest healthy machine: it is the next to be replaced for its age."""
        now, wall = self._clock.now(), self._clock.wall()
        while shelf.ready:
            machine = shelf.ready[0]
            if machine.healthy(now, wall, version) and machine.since + self._limits.max_age_s > now:
                shelf.lease(machine)
                self._refill_at = now + REFILL_DELAY_S
                return machine
            if machine.lease.agent.failure is not None:
                self._lose(shelf, machine, str(machine.lease.agent.failure))
            shelf.discard(machine)
        return None

    async def _next_started(self, request: MachineRequest, version: str) -> PooledMachine | None:
        """Take the template's first machine once it has started: it is ready sooner than one that starts now."""
        shelf = self._shelf(request)
        while shelf is not None and shelf.first_is_free:
            with shelf.awaiting_first():
                await shelf.start_ended.wait()
            machine = self._take_oldest(shelf, version)
            if machine is not None:
                return machine
        return None

    @asynccontextmanager
    async def _start_now(self, request: MachineRequest) -> AsyncIterator[Lease]:
        async with AsyncExitStack() as stack:
            with self._starting_now():
                lease = await stack.enter_async_context(self._source.acquire(request))
            if request.template in self._shelves:
                self._shelves[request.template].recover()
            yield lease

    @contextmanager
    def _starting_now(self) -> Iterator[None]:
        self._on_demand += 1
        try:
            yield
        finally:
            self._on_demand -= 1
            self._wake.set()

    # -- following builds ----------------------------------------------------------------------------------

    async def _keep_current(self) -> None:
        others_at = self._clock.now() + OTHERS_AFTER_S
        while True:
            await self._follow(others_at)
            await self._clock.sleep(FOLLOW_EVERY_S)

    async def _follow(self, others_at: float) -> None:
        """Update the shelves to the templates and builds there are now. No build is looked up before the first one."""
        templates = self._supply.templates()
        for name in sorted(templates, key=lambda name: name != self._first):
            known = name in self._shelves
            shelf = self._shelves.setdefault(name, Shelf(templates[name]))
            self._update(shelf, templates[name], await self._version(name))
            if not known and self._first not in (name, None):
                shelf.start_later(others_at)
        for name in self._shelves.keys() - templates.keys():
            self._update(self._shelves[name], self._shelves[name].template, None)

    async def _version(self, template: str) -> str | None:
        try:
            return await self._supply.version(template)
        except SandboxError:  # not built, for example; a request for it gets the error
            return None
        except Exception as error:
            logger.warning("cannot look up the build of template %s", template, exc_info=error)
            return None

    def _update(self, shelf: Shelf, template: Template, version: str | None) -> None:
        if (shelf.template, shelf.version) != (template, version):
            shelf.template, shelf.version = template, version
            shelf.recover()  # failures of the previous build say nothing about this one
            self._wake.set()

    # -- refilling -----------------------------------------------------------------------------------------

    async def _keep_filled(self) -> None:
        while True:
            self._wake = anyio.Event()
            plan = self._plan()
            self._carry_out(plan)
            await self._clock.wait(self._wake, plan.next_look)
            await self._clock.sleep(max(0.0, self._refill_at - self._clock.now()))

    def _plan(self) -> Plan:
        now, wall = self._clock.now(), self._clock.wall()
        states = [shelf.state(now, wall) for shelf in self._shelves.values()]
        return make_plan(states, self._limits, now, self._on_demand)

    def _carry_out(self, plan: Plan) -> None:
        for shelf in self._shelves.values():
            for machine in [machine for machine in shelf.ready if machine.id in plan.stop]:
                shelf.discard(machine)
        for name in plan.start:
            shelf = self._shelves[name]
            self._tasks.start_soon(self._keep_machine, shelf, shelf.begin_start(), name=f"pool: {name}")

    async def _keep_machine(self, shelf: Shelf, rehearse: bool) -> None:
        """Start a machine and keep it until it is released. Never raises: a failure counts against its shelf."""
        machine: PooledMachine | None = None
        try:
            async with self._source.acquire(MachineRequest(shelf.name, rehearse=rehearse)) as lease:
                if lease.version != shelf.version:  # there was a build meanwhile, or the shelf is behind
                    self._update(shelf, shelf.template, await self._version(shelf.name))
                # The machine was just made unique and its clock set. Both stay valid until it is leased: it is leased
                # once, and its clock runs while it stands still. `healthy` detects a jump of the host's clock.
                await lease.machine.pause()
                machine = PooledMachine(next(self._numbers), lease, self._clock.now(), self._clock.wall())
                shelf.put(machine)
                self._wake.set()
                await self._watch(shelf, machine)
        except Exception as error:
            if machine is None:
                shelf.fail(error, self._clock.now())
            else:
                self._lose(shelf, machine, str(first_error(error)))
                logger.warning("pooled machine %s ended with an error", machine.lease.machine.id, exc_info=error)
        finally:
            shelf.remove(machine)
            self._wake.set()

    async def _watch(self, shelf: Shelf, machine: PooledMachine) -> None:
        async def lost_after(wait: Callable[[], Awaitable[object]]) -> None:
            try:
                why = await wait()
            except HostLost as error:
                why = error
            self._lose(shelf, machine, str(why or machine.lease.agent.failure))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lost_after, machine.lease.machine.wait)
            tasks.start_soon(lost_after, machine.lease.agent.wait_failed)
            await machine.released.wait()
            tasks.cancel_scope.cancel()

    def _lose(self, shelf: Shelf, machine: PooledMachine, why: str) -> None:
        shelf.lose(machine, why, self._clock.now())
        self._wake.set()
