"""The pool: which machine a request gets, what replaces it, and that none is left behind."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self, cast

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import ByteStream

from guest.client.streams import ServeStream
from guest.errors import AgentTimeout
from mcp_sandbox.config import PoolSettings, Settings
from mcp_sandbox.errors import SandboxError, StartFailed, TemplateNotBuilt
from mcp_sandbox.machines.pool import FOLLOW_EVERY_S, OTHERS_AFTER_S, REFILL_DELAY_S, Clock, Pool, pool_limits
from mcp_sandbox.machines.pool_plan import PoolLimits
from mcp_sandbox.machines.pool_shelf import TemplateStats
from mcp_sandbox.machines.provider import CapacityFeed, Frozen, Lease, LeaseTimings, MachineRequest
from mcp_sandbox.machines.unique import new_identity
from mcp_sandbox.sandboxes.service import SandboxService
from templates.catalogue import Catalogue
from templates.model import MachineSize, PoolMode, Template
from tests.unit.fakes import FACTS, TEMPLATE, FakeAgent, FakeMachine
from vmm.errors import MachineLost
from vmm.types import NetworkMode

if TYPE_CHECKING:
    from guest.client import AgentClient

A, B = MachineRequest("a"), MachineRequest("b")
LIMITS = PoolLimits(min_ready=1, max_ready=3, max_starting=2, memory_mb=4096, max_age_s=1000, idle_s=600)


def template(name: str, mode: PoolMode = "pooled") -> Template:
    return Catalogue().load(TEMPLATE).model_copy(update={"name": name, "pool": mode})


SIZE = template("a").machine


def agent_of(lease: Lease) -> FakeAgent:
    return cast("FakeAgent", lease.agent)


class ManualClock(Clock):
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = 5000.0
        self.jump = 0.0
        self.slept: list[float] = []
        self.until: float | None = None
        self._event = anyio.Event()
        self._sleepers: list[tuple[float, anyio.Event]] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1e9 + self.time + self.jump

    async def wait(self, event: anyio.Event, until: float | None) -> None:
        self.until, self._event = until, event
        await event.wait()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await anyio.lowlevel.checkpoint()
        if seconds > REFILL_DELAY_S:
            woken = anyio.Event()
            self._sleepers.append((self.time + seconds, woken))
            await woken.wait()

    async def advance(self, seconds: float) -> None:
        """Let time pass, and wait until all tasks it woke are blocked again."""
        self.time += seconds
        if self.until is not None and self.until <= self.time:
            self._event.set()
        for until, woken in self._sleepers:
            if until <= self.time:
                woken.set()
        await anyio.wait_all_tasks_blocked()


class Source(anyio.AsyncContextManagerMixin):
    """A provider whose contexts must be left by the task that entered them. It records what it did."""

    def __init__(self, *templates: Template) -> None:
        self.offered = {template.name: template for template in templates}
        self.capacity = CapacityFeed()
        self.versions: dict[str, str] = {}  # of what is built; the first one where it does not say
        self.unbuilt: set[str] = set()
        self.begun: list[str] = []
        self.requests: list[MachineRequest] = []
        self.log: list[str] = []
        self.ended: list[FakeAgent] = []
        self.alive: Counter[str] = Counter()
        self.agents: list[FakeAgent] = []
        self.start_error: Exception | None = None
        self.end_error: Exception | None = None
        self.pause_error: Exception | None = None  # of machines that start from now on
        self.hold: anyio.Event | None = None  # starts wait for it
        self.hold_end: anyio.Event | None = None  # ends wait for it

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        yield self

    def templates(self) -> dict[str, Template]:
        return self.offered

    async def version(self, template: str) -> str:
        if template in self.unbuilt:
            raise TemplateNotBuilt(template)
        return self.versions.get(template, "v1")

    @asynccontextmanager
    async def freeze(self, lease: Lease) -> AsyncIterator[Frozen]:
        yield Frozen(lease.template, lease.host, 0)

    def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: ServeStream | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        assert copy
        return self.acquire(MachineRequest(f"thawed {frozen.template.name}"))

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        template_name = request.template
        self.requests.append(request)
        self.begun.append(template_name)
        version = self.versions.get(template_name, "v1")
        await anyio.lowlevel.checkpoint()
        if self.hold is not None:
            await self.hold.wait()
        if self.start_error is not None:
            raise self.start_error
        machine = FakeMachine()
        machine.pause_error = self.pause_error
        agent = FakeAgent(machine)
        self.agents.append(agent)
        self.alive[template_name] += 1
        self.log.append(f"+{template_name}")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep_forever)
                yield Lease(
                    machine,
                    cast("AgentClient", agent),
                    Catalogue().load(TEMPLATE),
                    FACTS,
                    LeaseTimings(queue_s=1.0, restore_s=2.0),
                    new_identity(),
                    version,
                )
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                if self.hold_end is not None:
                    await self.hold_end.wait()
            self.alive[template_name] -= 1
            self.log.append(f"-{template_name}")
            self.ended.append(agent)
            if self.end_error is not None:
                raise self.end_error


class Bench:
    """A pool, its source and its clock."""

    def __init__(self, *templates: Template, first: str | None = None, **limits: float) -> None:
        self.source = Source(*(templates or [template("a")]))
        self.clock = ManualClock()
        chosen = replace(LIMITS, **limits)  # type: ignore[arg-type]
        self.pool = Pool(self.source, self.source, chosen, first=first, clock=self.clock)

    def stats(self, name: str = "a") -> TemplateStats:
        return self.pool.stats().templates[name]

    async def use(self, name: str = "a") -> Lease:
        """Lease a machine and give it back."""
        async with self.pool.acquire(MachineRequest(name)) as lease:
            pass
        await anyio.wait_all_tasks_blocked()
        return lease


@asynccontextmanager
async def filled(*templates: Template, first: str | None = None, **limits: float) -> AsyncIterator[Bench]:
    """A pool that has come to rest. No machine may be left after it is closed."""
    bench = Bench(*templates, first=first, **limits)
    with anyio.fail_after(20):
        async with bench.pool:
            await anyio.wait_all_tasks_blocked()
            yield bench
    assert not +bench.source.alive


# -- leasing -----------------------------------------------------------------------------------------------


async def test_a_ready_machine_is_leased_at_once():
    async with filled() as bench:
        ready = bench.source.agents[0]
        async with bench.pool.acquire(A) as lease:
            assert agent_of(lease) is ready
            assert len(bench.source.begun) == 1  # nothing else was done for it
            assert lease.timings == LeaseTimings(0.0, 0.0)
        assert (bench.stats().hits, bench.stats().misses) == (1, 0)


async def test_a_leased_machine_has_ended_when_its_lease_ends():
    async with filled() as bench:
        async with bench.pool.acquire(A):
            pass
        assert bench.source.ended == bench.source.agents[:1]
        await anyio.wait_all_tasks_blocked()
        assert agent_of(await bench.use()) is not bench.source.agents[0]


async def test_a_refill_leaves_the_cpu_to_the_first_run_after_a_hit():
    async with filled() as bench:
        assert REFILL_DELAY_S not in bench.clock.slept
        async with bench.pool.acquire(A):
            await anyio.wait_all_tasks_blocked()
            assert REFILL_DELAY_S in bench.clock.slept


async def test_machines_rehearse_only_for_the_pool_and_the_first_not_even_there():
    async with filled() as bench:
        assert [request.rehearse for request in bench.source.requests] == [False]
        async with bench.pool.acquire(A):
            await anyio.wait_all_tasks_blocked()
            assert [request.rehearse for request in bench.source.requests] == [False, True]


async def test_a_frozen_state_is_never_thawed_from_a_pooled_machine():
    async with filled() as bench, bench.pool.acquire(A) as lease, bench.pool.freeze(lease) as frozen:
        async with bench.pool.thaw(frozen, copy=True):
            assert bench.source.alive[f"thawed {TEMPLATE}"] == 1
        assert bench.source.alive[f"thawed {TEMPLATE}"] == 0
        assert (bench.stats().hits, bench.stats().misses) == (1, 0)


@pytest.mark.parametrize(
    ("size", "hits"), [(None, 1), (SIZE, 1), (SIZE.model_copy(update={"vcpus": SIZE.vcpus + 1}), 0)]
)
async def test_a_pooled_machine_is_leased_only_to_a_request_that_it_satisfies(size: MachineSize | None, hits: int):
    async with filled() as bench:
        request = MachineRequest("a", "me", size)
        async with bench.pool.acquire(request):
            assert bench.stats().hits == hits
        assert (request in bench.source.requests) == (hits == 0)


async def serve_nothing(_stream: ByteStream) -> None:
    await anyio.lowlevel.checkpoint()


async def test_a_pooled_machine_waits_offline_and_gets_its_streams_with_the_lease():
    async with filled() as bench:
        request = MachineRequest("a", "me", network=NetworkMode.PROXY, serve_stream=serve_nothing)
        async with bench.pool.acquire(request) as lease:
            agent = agent_of(lease)
            assert agent is bench.source.agents[0]
            assert (agent.serve_stream, agent.networks) == (serve_nothing, ["proxy"])
            assert (lease.network, lease.identity.network) == (NetworkMode.PROXY, "proxy")
            pooled = bench.source.requests[0]
            assert (pooled.network, pooled.serve_stream) == (NetworkMode.NONE, None)


async def test_a_pooled_machine_that_is_leased_without_a_network_is_asked_nothing():
    async with filled() as bench, bench.pool.acquire(A) as lease:
        assert (agent_of(lease).networks, agent_of(lease).serve_stream) == ([], None)


async def test_a_machine_with_a_device_never_comes_from_the_pool():
    async with filled() as bench, bench.pool.acquire(MachineRequest("a", network=NetworkMode.NAT)) as lease:
        assert agent_of(lease) is not bench.source.agents[0]
        assert bench.stats().hits == 0


async def test_a_pooled_machine_that_cannot_go_online_is_a_failed_start():
    async with filled() as bench:
        bench.source.agents[0].refresh_error = AgentTimeout("no answer")
        request = MachineRequest("a", "me", network=NetworkMode.PROXY, serve_stream=serve_nothing)
        with pytest.raises(StartFailed, match="no answer"):
            await bench.pool.acquire(request).__aenter__()
        assert bench.source.ended == bench.source.agents[:1]


async def test_a_leased_machine_is_replaced():
    async with filled() as bench, bench.pool.acquire(A):
        await anyio.wait_all_tasks_blocked()
        assert bench.source.alive["a"] == 2
        assert bench.stats().ready == 1


@asynccontextmanager
async def starting(bench: Bench, requests: int) -> AsyncIterator[tuple[list[Lease], anyio.Event]]:
    """A pool whose first machine starts with an event, and some requests; yields what they got so far and the event."""
    hold = bench.source.hold = anyio.Event()
    got: list[Lease] = []

    async def ask() -> None:
        async with bench.pool.acquire(A) as lease:
            got.append(lease)
            await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with bench.pool, anyio.create_task_group() as tasks:
            await anyio.wait_all_tasks_blocked()
            assert bench.source.begun == ["a"]  # the refill
            for _ in range(requests):
                tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            yield got, hold
            tasks.cancel_scope.cancel()
    assert not +bench.source.alive


async def test_a_request_takes_the_machine_that_is_starting_already():
    bench = Bench(max_starting=1)
    async with starting(bench, requests=1) as (got, hold):
        assert bench.source.begun == ["a"]
        hold.set()
        await anyio.wait_all_tasks_blocked()
        assert [agent_of(lease) for lease in got] == bench.source.agents[:1]
        assert not agent_of(got[0]).machine.stands_still
        assert bench.stats().misses == 1


async def test_more_requests_than_starting_machines_get_machines_of_their_own():
    bench = Bench(max_starting=1)
    async with starting(bench, requests=3) as (got, hold):
        assert bench.source.begun == ["a", "a", "a"]
        hold.set()
        await anyio.wait_all_tasks_blocked()
        assert len({agent_of(lease) for lease in got}) == 3


async def test_a_request_gets_its_own_machine_when_the_one_it_waits_for_does_not_start():
    bench = Bench(max_starting=1)
    bench.source.start_error = StartFailed("no memory")
    async with starting(bench, requests=1) as (got, hold):
        second = bench.source.hold = anyio.Event()
        hold.set()
        await anyio.wait_all_tasks_blocked()
        assert (bench.source.begun, got) == (["a", "a"], [])
        bench.source.start_error = None
        second.set()
        await anyio.wait_all_tasks_blocked()
        assert len(got) == 1


async def test_the_first_template_starts_with_the_pool_and_others_later():
    async with filled(template("a"), template("b"), first="b") as bench:
        assert bench.source.begun == ["b"]
        await bench.clock.advance(OTHERS_AFTER_S)
        assert bench.source.begun == ["b", "a"]


async def test_a_template_that_was_asked_for_starts_without_delay():
    async with filled(template("a"), template("b"), first="b") as bench, bench.pool.acquire(A):
        await anyio.wait_all_tasks_blocked()
        assert (bench.source.alive["a"], bench.stats("a").ready) == (2, 1)


async def test_the_refill_waits_while_requests_wait():
    async with filled(min_ready=2) as bench, anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(bench.pool.acquire(A))
        bench.source.hold = anyio.Event()

        async def ask() -> None:
            async with bench.pool.acquire(A):
                pass

        for _ in range(5):
            tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert (bench.stats().starting, bench.stats().misses) == (0, 5)
        bench.source.hold.set()
        await anyio.wait_all_tasks_blocked()
        assert bench.stats().ready == 3


async def test_a_machine_of_a_cold_template_comes_from_the_source():
    async with filled(template("a", "cold")) as bench:
        assert bench.source.begun == []
        assert (await bench.use()).timings == LeaseTimings(1.0, 2.0)
        assert (bench.stats().hits, bench.stats().misses, bench.stats().started) == (0, 0, 0)


async def test_a_request_for_an_unknown_template_goes_to_the_source():
    async with filled() as bench:
        bench.source.start_error = StartFailed("no such template")
        with pytest.raises(SandboxError, match="no such template"):
            await bench.use("unheard-of")


async def test_an_error_of_the_caller_reaches_the_caller_unchanged():
    async with filled() as bench:
        with pytest.raises(ZeroDivisionError):
            async with bench.pool.acquire(A):
                raise ZeroDivisionError
        assert bench.source.ended == bench.source.agents[:1]


async def test_an_error_while_a_machine_ends_is_only_logged(caplog: pytest.LogCaptureFixture):
    async with filled() as bench:
        bench.source.end_error = StartFailed("it did not want to go")
        await bench.use()
        bench.source.end_error = None
        assert "it did not want to go" in caplog.text
        assert (bench.stats().failed, bench.stats().ready) == (0, 1)


# -- size --------------------------------------------------------------------------------------------------


async def test_the_pool_grows_after_a_burst_and_shrinks_later():
    async with filled() as bench:
        async with AsyncExitStack() as stack:
            for _ in range(5):
                await stack.enter_async_context(bench.pool.acquire(A))
        await anyio.wait_all_tasks_blocked()
        assert (bench.stats().ready, bench.stats().hits, bench.stats().misses) == (3, 1, 4)
        assert bench.clock.until == bench.clock.time + 600  # it sleeps until the burst expires
        await bench.clock.advance(599)
        assert bench.stats().ready == 3
        await bench.clock.advance(1)
        assert (bench.stats().ready, bench.stats().stopped, bench.source.alive["a"]) == (1, 2, 1)


async def test_the_less_used_template_gives_way_when_memory_is_short():
    size = template("x").machine.host_mb
    async with filled(template("a"), template("b"), memory_mb=size) as bench:
        await bench.use("a")
        await bench.use("b")
        assert dict(+bench.source.alive) == {"a": 1}  # used as much as the other: no reason to change
        await bench.use("b")
        await bench.use("b")
        assert dict(+bench.source.alive) == {"b": 1}
        assert bench.source.log[-1] == "+b"  # after the other machine had ended


async def test_a_stopping_machine_uses_memory_until_it_has_ended():
    size = template("x").machine.host_mb
    async with filled(template("a"), template("b"), memory_mb=size) as bench:
        bench.source.hold_end = anyio.Event()
        async with bench.pool.acquire(B):
            await bench.clock.advance(20)
            async with bench.pool.acquire(B):
                await anyio.wait_all_tasks_blocked()
                assert (bench.stats("a").ready, bench.stats("b").starting) == (0, 0)
                bench.source.hold_end.set()
                await anyio.wait_all_tasks_blocked()
                assert bench.stats("b").ready == 1


# -- machines that are old or unhealthy ---------------------------------------------------------------------


async def test_a_machine_that_died_in_the_pool_is_replaced():
    async with filled() as bench:
        bench.source.agents[0].machine.ended.set()
        await anyio.wait_all_tasks_blocked()
        assert (bench.stats().ready, bench.source.alive["a"]) == (0, 0)
        assert "out of memory" in (bench.stats().last_error or "")
        await bench.clock.advance(1)
        assert (bench.stats().ready, bench.stats().failed) == (1, 1)


async def test_a_machine_whose_agent_is_gone_is_replaced():
    async with filled() as bench:
        bench.source.agents[0].go()
        await anyio.wait_all_tasks_blocked()
        await bench.clock.advance(1)
        assert (bench.stats().ready, bench.source.alive["a"]) == (1, 1)
        assert "closed the stream" in (bench.stats().last_error or "")


async def test_a_machine_whose_agent_went_a_moment_ago_is_not_leased():
    async with filled() as bench:
        bench.source.agents[0].go()
        async with bench.pool.acquire(A) as lease:
            assert agent_of(lease) is bench.source.agents[1]
            await anyio.wait_all_tasks_blocked()
            assert bench.source.ended == bench.source.agents[:1]
        assert (bench.stats().hits, bench.stats().misses, bench.stats().failed) == (0, 1, 1)


async def test_a_ready_machine_stands_still_until_it_is_leased():
    async with filled() as bench:
        machine = bench.source.agents[0].machine
        assert machine.stands_still
        async with bench.pool.acquire(A) as lease:
            assert lease.machine is machine
            assert not machine.stands_still


async def test_a_machine_that_cannot_stand_still_is_replaced():
    async with filled() as bench:
        bench.source.pause_error = MachineLost("it did not stop")
        async with bench.pool.acquire(A):
            await anyio.wait_all_tasks_blocked()
            assert (bench.stats().ready, bench.stats().failed, bench.source.alive["a"]) == (0, 1, 1)
            bench.source.pause_error = None
            await bench.clock.advance(1)
            assert (bench.stats().ready, bench.source.alive["a"]) == (1, 2)


async def test_a_machine_is_not_leased_after_the_hosts_clock_has_jumped():
    async with filled() as bench:
        bench.clock.jump = 3600  # the host was suspended
        assert agent_of(await bench.use()) is not bench.source.agents[0]
        assert bench.stats().failed == 0
        assert (await bench.use()).timings == LeaseTimings(0.0, 0.0)


async def test_an_old_machine_is_replaced_before_it_is_too_old():
    async with filled() as bench:
        await bench.clock.advance(900)
        assert bench.source.log == ["+a", "+a", "-a"]
        assert (bench.stats().ready, bench.stats().failed) == (1, 0)


async def test_a_machine_that_is_too_old_is_not_leased():
    async with filled() as bench:
        bench.clock.time += 1000  # and the pool has not planned yet
        assert agent_of(await bench.use()) is not bench.source.agents[0]


async def test_a_leased_machine_that_dies_is_not_counted_as_a_failure_of_the_pool():
    async with filled() as bench:
        async with bench.pool.acquire(A):
            bench.source.agents[0].machine.ended.set()
            await anyio.wait_all_tasks_blocked()
            assert bench.source.alive["a"] == 2  # the lease is still open
        assert bench.stats().failed == 0


# -- builds ------------------------------------------------------------------------------------------------


async def test_a_rebuilt_template_is_tried_at_once_however_often_the_previous_build_failed():
    async with filled() as bench:
        bench.source.start_error = StartFailed("the snapshot is damaged")
        await bench.use()
        for _ in range(12):
            await bench.clock.advance(300)
        begun, bench.source.start_error = len(bench.source.begun), None
        bench.source.versions["a"] = "v2"
        await bench.clock.advance(FOLLOW_EVERY_S)
        assert len(bench.source.begun) > begun
        assert bench.stats().ready == 1


async def test_a_machine_of_an_old_build_is_not_leased():
    async with filled() as bench:
        bench.source.versions["a"] = "v2"  # and the pool has not planned yet
        lease = await bench.use()
        assert lease.version == "v2"
        assert bench.source.agents[0] in bench.source.ended
        assert (bench.stats().ready, bench.stats().misses, bench.stats().failed) == (1, 1, 0)


async def test_machines_of_an_old_build_are_replaced_without_a_request():
    async with filled() as bench:
        bench.source.versions["a"] = "v2"
        await bench.clock.advance(FOLLOW_EVERY_S)
        assert bench.source.ended == bench.source.agents[:1]
        assert (bench.stats().ready, bench.source.alive["a"]) == (1, 1)
        async with bench.pool.acquire(A) as lease:
            assert (lease.version, lease.timings) == ("v2", LeaseTimings(0.0, 0.0))


async def test_a_leased_machine_of_an_old_build_stays():
    async with filled() as bench, bench.pool.acquire(A):
        bench.source.versions["a"] = "v2"
        await bench.clock.advance(FOLLOW_EVERY_S)
        assert bench.source.agents[0] not in bench.source.ended


async def test_a_machine_started_from_an_old_build_is_not_kept():
    bench = Bench()
    bench.source.hold = anyio.Event()
    with anyio.fail_after(20):
        async with bench.pool:
            await anyio.wait_all_tasks_blocked()
            bench.source.versions["a"] = "v2"
            await bench.clock.advance(FOLLOW_EVERY_S)
            bench.source.hold.set()
            await anyio.wait_all_tasks_blocked()
            assert bench.source.ended == bench.source.agents[:1]
            assert (await bench.use()).version == "v2"


async def test_a_template_that_is_not_built_is_not_pooled_and_not_reported_as_failing():
    bench = Bench()
    bench.source.unbuilt.add("a")
    with anyio.fail_after(20):
        async with bench.pool:
            await anyio.wait_all_tasks_blocked()
            assert (bench.source.begun, bench.stats().last_error) == ([], None)
            with pytest.raises(TemplateNotBuilt):
                await bench.use()
            bench.source.unbuilt.clear()
            await bench.clock.advance(FOLLOW_EVERY_S)
            assert bench.stats().ready == 1


async def test_a_new_template_is_pooled_and_a_removed_one_no_longer():
    async with filled() as bench:
        bench.source.offered = {"b": template("b")}
        bench.source.unbuilt.add("a")
        await bench.clock.advance(FOLLOW_EVERY_S)
        assert dict(+bench.source.alive) == {"b": 1}
        assert bench.stats("b").ready == 1


async def test_a_template_that_becomes_cold_is_no_longer_pooled():
    async with filled() as bench:
        bench.source.offered = {"a": template("a", "cold")}
        await bench.clock.advance(FOLLOW_EVERY_S)
        assert bench.source.alive["a"] == 0
        assert (await bench.use()).timings == LeaseTimings(1.0, 2.0)


async def test_a_failing_supply_does_not_end_the_pool(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    async with filled() as bench:

        async def fail(_source: Source, _template: str) -> str:
            raise OSError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(Source, "version", fail)
            await bench.clock.advance(FOLLOW_EVERY_S)
        assert "the disk is gone" in caplog.text
        await bench.clock.advance(FOLLOW_EVERY_S)
        assert bench.stats().ready == 1


# -- failures ----------------------------------------------------------------------------------------------


async def test_failed_starts_are_retried_less_and_less_often():
    bench = Bench()
    bench.source.start_error = TemplateNotBuilt("a")
    with anyio.fail_after(20):
        async with bench.pool:
            await anyio.wait_all_tasks_blocked()
            waits = []
            for _ in range(12):
                assert bench.clock.until is not None
                waits.append(bench.clock.until - bench.clock.time)
                await bench.clock.advance(waits[-1])
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert len(bench.source.begun) == 13
    assert "is not built" in (bench.stats().last_error or "")


async def test_machines_that_die_young_are_replaced_less_and_less_often():
    async with filled() as bench:
        for wait in (1, 2, 4, 8):
            bench.source.agents[-1].machine.ended.set()
            await anyio.wait_all_tasks_blocked()
            assert bench.clock.until == bench.clock.time + wait
            await bench.clock.advance(wait)
        await bench.clock.advance(60)
        bench.source.agents[-1].machine.ended.set()
        await anyio.wait_all_tasks_blocked()
        assert bench.clock.until == bench.clock.time + 1  # that one had been healthy for a while


async def test_a_start_that_succeeds_ends_the_wait_after_failed_refills():
    bench = Bench()
    bench.source.start_error = OSError("no memory")
    with anyio.fail_after(20):
        async with bench.pool:
            await anyio.wait_all_tasks_blocked()
            await bench.clock.advance(1)
            assert (bench.stats().failed, bench.stats().ready) == (2, 0)
            bench.source.start_error = None
            await bench.use()
            assert bench.stats().ready == 1


async def test_the_same_failure_is_logged_once(caplog: pytest.LogCaptureFixture):
    bench = Bench()
    bench.source.start_error = TemplateNotBuilt("a")
    async with bench.pool:
        await anyio.wait_all_tasks_blocked()
        await bench.clock.advance(1)
        assert bench.stats().failed == 2
    assert len(caplog.records) == 1


# -- cancelling and closing --------------------------------------------------------------------------------


async def test_a_cancelled_request_takes_no_machine():
    async with filled() as bench:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with bench.pool.acquire(A):
                pytest.fail("a machine was leased")
        assert scope.cancelled_caught
        assert (bench.stats().ready, bench.stats().hits) == (1, 0)


async def test_a_caller_cancelled_during_its_lease_leaves_nothing():
    async with filled() as bench:
        with anyio.CancelScope() as scope:
            async with bench.pool.acquire(A):
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert bench.source.ended == bench.source.agents[:1]


@pytest.mark.parametrize("steps", range(6))
async def test_a_caller_cancelled_while_a_machine_starts_leaves_nothing(steps: int):
    async with filled(template("a", "cold")) as bench:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.use)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert bench.source.alive["a"] == 0


async def test_a_pool_that_retires_ends_machines_that_wait_and_keeps_leased_ones():
    async with filled() as bench, bench.pool.acquire(A):
        await anyio.wait_all_tasks_blocked()
        assert (bench.source.alive["a"], bench.stats().ready) == (2, 1)
        bench.pool.retire()
        await anyio.wait_all_tasks_blocked()
        assert (bench.source.alive["a"], bench.stats().ready) == (1, 0)


async def test_closing_the_pool_ends_machines_in_all_states_and_waits_for_them():
    bench = Bench(min_ready=3, max_starting=1)
    leave = anyio.Event()

    async def keep() -> None:
        async with bench.pool.acquire(A):
            await leave.wait()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            async with bench.pool:
                await anyio.wait_all_tasks_blocked()
                bench.source.hold = anyio.Event()
                tasks.start_soon(keep)
                await anyio.wait_all_tasks_blocked()
                assert (bench.stats().ready, bench.stats().starting, bench.source.alive["a"]) == (2, 1, 3)
            assert bench.source.alive["a"] == 0  # although one is still leased
            assert (bench.stats().ready, bench.stats().starting) == (0, 0)
            leave.set()


async def test_sandboxes_come_from_the_pool():
    bench = Bench(template(TEMPLATE))
    with anyio.fail_after(20):
        async with bench.pool, SandboxService(bench.pool, Settings()) as service:
            await anyio.wait_all_tasks_blocked()
            box = await service.create("me")
            assert bench.stats(TEMPLATE).hits == 1
            assert await service.close("me", box.sandbox_id)
            await service.create("me")
    assert not +bench.source.alive


# -- details ----------------------------------------------------------------------------------------------


async def test_the_real_clock_waits_for_an_event_or_a_time():
    clock = Clock()
    happened = anyio.Event()
    happened.set()
    with anyio.fail_after(20):
        await clock.wait(anyio.Event(), clock.now())
        await clock.wait(happened, None)


def test_refills_leave_half_of_the_starts_to_requests():
    limits = pool_limits(PoolSettings(min=2), max_restores=4)
    assert (limits.max_starting, limits.min_ready) == (2, 2)
    assert pool_limits(PoolSettings(), max_restores=1).max_starting == 1
