"""Machines kept ready: a provider in front of another one, which answers at once while it has any."""

import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Protocol, Self

import anyio
import anyio.lowlevel

from guest.errors import GuestError
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxError, first_of
from mcp_sandbox.machines.pool_plan import Plan, PoolLimits, make_plan
from mcp_sandbox.machines.pool_shelf import PooledMachine, PoolStats, Shelf
from mcp_sandbox.machines.provider import Frozen, Lease, MachineRequest, Provider, ProviderLayer, Supply
from templates.model import Template

CHECK_EVERY_S = 15.0  # a machine that waits is asked so often whether it still answers
FOLLOW_EVERY_S = 2.0  # so soon after a build machines of the new one are started, even if nobody asks for any
CHECK_S = 5.0  # one that hangs never does, one on a busy host does by then
LET_ANSWER_S = 0.02  # starting a machine keeps the event loop busy: whoever just got one hears of it first

logger = logging.getLogger(__name__)


class Clock:
    """The time, and waiting for it. Tests bring their own."""

    def now(self) -> float:
        """Seconds that only go forward."""
        return anyio.current_time()

    def wall(self) -> float:
        """The host's date, which can jump."""
        return time.time()

    async def wait(self, event: anyio.Event, until: float | None) -> None:
        """Return when `event` is set or it is `until`."""
        with anyio.CancelScope(deadline=float("inf") if until is None else until):
            await event.wait()

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class OnRequest(Protocol):
    """Told of every machine that is asked of the pool."""

    def __call__(self, template: str, /, *, hit: bool) -> None: ...


def _ignore(_template: str, *, hit: bool) -> None:
    """For those who do not count."""


def pool_limits(settings: Settings) -> PoolLimits:
    """What the settings let a pool hold."""
    return PoolLimits(
        min_ready=settings.pool.min,
        max_ready=settings.pool.max,
        max_starting=max(1, settings.limits.restores // 2),  # the source has room left for those who cannot wait
        memory_mb=settings.pool.memory_mb,
        max_age_s=settings.pool.max_age_s,
        idle_s=settings.pool.idle_s,
    )


class Pool(ProviderLayer):
    """Keeps machines of `source` ready, as many as the plan says. Leaving it ends all of them.

    `supply` says what they are made from. Machines of something that was built anew meanwhile are nobody's any more.

    Every machine has a task of its own, its holder, that enters and leaves the source's context: contexts with task
    groups inside must be left by the task that entered them, and whoever gets the machine runs in another one.
    """

    def __init__(
        self,
        source: Provider,
        supply: Supply,
        limits: PoolLimits,
        *,
        clock: Clock | None = None,
        on_request: OnRequest = _ignore,
    ) -> None:
        super().__init__(source)
        self._on_request = on_request
        self._limits = limits
        self._clock = clock or Clock()
        self._supply = supply
        self._shelves: dict[str, Shelf] = {}
        self._on_demand = 0  # machines that somebody waits for
        self._numbers = count(1)
        self._wake = anyio.Event()  # something happened that may change the plan
        self._tasks = anyio.create_task_group()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        async with self._source, self._tasks:
            self._tasks.start_soon(self._keep_current, name="pool's builds")
            self._tasks.start_soon(self._keep_filled, name="pool")
            try:
                yield self
            finally:
                for shelf in self._shelves.values():
                    shelf.ready.clear()  # these machines are about to end: hand out none of them
                self._tasks.cancel_scope.cancel()

    def stats(self) -> PoolStats:
        """What the pool has and did."""
        return PoolStats({name: shelf.stats() for name, shelf in self._shelves.items()})

    def described(self) -> list[dict[str, object]]:
        """The same for operators, one entry for each template."""
        return [{"template": name, **asdict(stats)} for name, stats in self.stats().templates.items()]

    # -- handing out ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        """Lease a machine that is ready, or else one of the source. Either way it ends with this context.

        Raises:
            SandboxError: the source has no machine. A failed refill raises nothing here.
        """
        version = await self._supply.version(request.template)
        await anyio.lowlevel.checkpoint_if_cancelled()  # the last one on this way: nothing can get lost after it
        machine = self._take(request, version)
        if machine is None:
            async with self._start_now(request) as lease:
                yield lease
            return
        try:
            yield machine.lease
        finally:
            machine.released.set()
            with anyio.CancelScope(shield=True):
                await machine.ended.wait()

    @asynccontextmanager
    async def thaw(self, frozen: Frozen, *, copy: bool) -> AsyncIterator[Lease]:
        """Lease a machine from the source: no pooled machine has that state."""
        async with AsyncExitStack() as stack:
            with self._waiting():
                lease = await stack.enter_async_context(self._source.thaw(frozen, copy=copy))
            yield lease

    def _take(self, request: MachineRequest, version: str) -> PooledMachine | None:
        """Take the oldest healthy machine that satisfies the request: it is the next to be replaced for its age."""
        shelf = self._shelves.get(request.template)
        if shelf is None or shelf.template.pool != "pooled" or not request.is_standard(shelf.template):
            return None
        shelf.version = version
        now, wall = self._clock.now(), self._clock.wall()
        shelf.demand = shelf.demand.after_request(now, self._limits.max_ready)
        self._wake.set()
        while shelf.ready:
            machine = shelf.ready[0]
            if machine.healthy(now, wall, version) and machine.since + self._limits.max_age_s > now:
                shelf.hand_out(machine)
                self._on_request(request.template, hit=True)
                return machine
            if machine.lease.agent.failure is not None:
                self._lose(shelf, machine, str(machine.lease.agent.failure))
            shelf.discard(machine)
        shelf.misses += 1
        self._on_request(request.template, hit=False)
        return None

    @asynccontextmanager
    async def _start_now(self, request: MachineRequest) -> AsyncIterator[Lease]:
        async with AsyncExitStack() as stack:
            with self._waiting():
                lease = await stack.enter_async_context(self._source.acquire(request))
            if request.template in self._shelves:
                self._shelves[request.template].recover()
            yield lease

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._on_demand += 1
        try:
            yield
        finally:
            self._on_demand -= 1
            self._wake.set()

    # -- following what is built ---------------------------------------------------------------------------

    async def _keep_current(self) -> None:
        while True:
            await self._follow()
            await self._clock.sleep(FOLLOW_EVERY_S)

    async def _follow(self) -> None:
        """Find out which templates there are now, and which making of each machines are to be of."""
        templates = self._supply.templates()
        for name, template in templates.items():
            shelf = self._shelves.setdefault(name, Shelf(template))
            self._update(shelf, template, await self._version(name))
        for name in self._shelves.keys() - templates.keys():
            self._update(self._shelves[name], self._shelves[name].template, None)

    async def _version(self, template: str) -> str | None:
        try:
            return await self._supply.version(template)
        except SandboxError:  # it is not built, say; whoever asks for a machine is told
            return None
        except Exception as error:
            logger.warning("nobody knows what is built of %s", template, exc_info=error)
            return None

    def _update(self, shelf: Shelf, template: Template, version: str | None) -> None:
        if (shelf.template, shelf.version) != (template, version):
            shelf.template, shelf.version = template, version
            self._wake.set()

    # -- refilling -----------------------------------------------------------------------------------------

    async def _keep_filled(self) -> None:
        while True:
            self._wake = anyio.Event()
            plan = self._plan()
            self._carry_out(plan)
            await self._clock.wait(self._wake, plan.next_look)
            await self._clock.sleep(LET_ANSWER_S)

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
            shelf.starting += 1
            self._tasks.start_soon(self._hold, shelf, name=f"holder of a {name}")

    async def _hold(self, shelf: Shelf) -> None:
        """Start a machine and keep it until it is released. Runs in a task of its own; its errors are nobody else's."""
        machine: PooledMachine | None = None
        try:
            async with self._source.acquire(MachineRequest(shelf.name)) as lease:
                if lease.version != shelf.version:  # something was built meanwhile, or it was late
                    self._update(shelf, shelf.template, await self._version(shelf.name))
                # It was made unique and its clock was set just now. Both stay so: it is handed out once, and a
                # machine that waits is running, so its clock runs too. `healthy` sees what could part the clocks.
                machine = PooledMachine(next(self._numbers), lease, self._clock.now(), self._clock.wall())
                shelf.put(machine)
                self._wake.set()
                await self._watch(shelf, machine)
        except Exception as error:
            if machine is None:
                shelf.fail(error, self._clock.now())
            else:
                self._lose(shelf, machine, str(first_of(error)))
                logger.warning("machine %s of the pool ended with an error", machine.lease.machine.id, exc_info=error)
        finally:
            shelf.forget(machine)
            self._wake.set()

    async def _watch(self, shelf: Shelf, machine: PooledMachine) -> None:
        async def lost_after(wait: Callable[[], Awaitable[object]]) -> None:
            why = await wait()
            self._lose(shelf, machine, str(why or machine.lease.agent.failure))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lost_after, machine.lease.machine.wait)
            tasks.start_soon(lost_after, machine.lease.agent.wait_failed)
            tasks.start_soon(lost_after, partial(self._hangs, shelf, machine))
            await machine.released.wait()
            tasks.cancel_scope.cancel()

    async def _hangs(self, shelf: Shelf, machine: PooledMachine) -> str | None:
        """Return when a machine that waits does not answer, or when it waits no more. One that hangs looks fine."""
        while True:
            await self._clock.sleep(CHECK_EVERY_S * random.uniform(0.5, 1.0))  # noqa: S311 - not all at the same time
            if machine not in shelf.ready:
                return None
            try:
                with anyio.fail_after(CHECK_S):
                    await machine.lease.agent.usage()
            except (GuestError, TimeoutError):
                return "it does not answer"

    def _lose(self, shelf: Shelf, machine: PooledMachine, why: str) -> None:
        shelf.lose(machine, why, self._clock.now())
        self._wake.set()
