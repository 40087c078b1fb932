"""A provider over several hosts: the service works with it unchanged while hosts join, get lost and differ."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Self

import anyio
import pytest

from guest.client.streams import ServeStream
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import HostLost, MachineLost, NoHost, QueueTimeout, TemplateNotBuilt
from mcp_sandbox.machines.pool import Pool
from mcp_sandbox.machines.pool_plan import PoolLimits
from mcp_sandbox.machines.provider import Capacity, CapacityFeed, Frozen, Lease, MachineRequest, Provider
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from templates.catalogue import Catalogue
from templates.model import Template
from tests.unit.fakes import FACTS, REQUEST, TEMPLATE, FakeProvider

ME = "me"


class Host(FakeProvider):
    """A host with room for a few machines, and the supply of its own builds."""

    def __init__(self, name: str, machines: int, version: str | None = "v1") -> None:
        super().__init__(replace(FACTS, name=name))
        self.name = name
        self.machines = machines
        self.version = version or ""

    def templates(self) -> Mapping[str, Template]:
        return {TEMPLATE: Catalogue().load(TEMPLATE)}

    async def version_of(self, template: str) -> str:
        if not self.version:
            raise TemplateNotBuilt(template)
        return self.version

    def vanish(self, reason: str) -> None:
        for agent in self.agents:
            agent.machine.host_lost = HostLost(self.name, reason)
            agent.machine.ended.set()


class Builds:
    """The supply of one host."""

    def __init__(self, host: Host) -> None:
        self.templates = host.templates
        self.version = host.version_of


class Cluster(anyio.AsyncContextManagerMixin):
    """A provider that starts each machine on the emptiest host that has a build of its template."""

    def __init__(self, *hosts: Host) -> None:
        self.capacity = CapacityFeed()
        self.lost: dict[str, str] = {}
        self._hosts: dict[str, tuple[Host, Provider]] = {}
        for host in hosts:
            self.join(host)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        yield self

    def join(self, host: Host, provider: Provider | None = None) -> None:
        self._hosts[host.name] = host, provider or host
        self._announce()

    def lose(self, name: str, reason: str) -> None:
        host, _ = self._hosts.pop(name)
        self.lost[name] = reason
        self._announce()
        host.vanish(reason)

    def _announce(self) -> None:
        self.capacity.update(Capacity(machines=sum(host.machines for host, _ in self._hosts.values())))

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        free = [pair for pair in self._hosts.values() if pair[0].version and pair[0].alive < pair[0].machines]
        if not free:
            raise NoHost(f"template {request.template} is built on no host that has room")
        _, provider = min(free, key=lambda pair: pair[0].alive)
        async with provider.acquire(request) as lease:
            yield lease

    def freeze(self, lease: Lease) -> AbstractAsyncContextManager[Frozen]:
        return self._provider(lease.host.name).freeze(lease)

    @asynccontextmanager
    async def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: ServeStream | None = None
    ) -> AsyncIterator[Lease]:
        async with self._provider(frozen.host.name).thaw(frozen, copy=copy, serve_stream=serve_stream) as lease:
            yield lease

    def _provider(self, name: str) -> Provider:
        if name in self.lost:
            raise HostLost(name, self.lost[name])
        return self._hosts[name][1]


@asynccontextmanager
async def serving(cluster: Cluster, **limits: float) -> AsyncIterator[SandboxService]:
    settings = Settings(limits={"queue_timeout_s": 3600, **limits})
    with anyio.fail_after(20):
        async with cluster, SandboxService(cluster, settings) as service:
            yield service


def host_of(service: SandboxService, sandbox_id: str) -> str:
    [lease] = [box.lease for box in service.alive() if box.id == sandbox_id]
    assert lease is not None
    return lease.host.name


async def test_a_lost_host_ends_only_its_own_sandboxes():
    cluster = Cluster(Host("a", 2), Host("b", 2))
    async with serving(cluster) as service:
        on = {host_of(service, box): box for box in [(await service.create(ME)).sandbox_id for _ in range(2)]}
        assert set(on) == {"a", "b"}
        cluster.lose("b", "no heartbeat for 10 s")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(MachineLost, match="its host b was lost: no heartbeat for 10 s"):
            await service.run(CodeRun(ME, "1", on["b"]))
        assert (await service.run(CodeRun(ME, "1", on["a"]))).status == "ok"
        assert host_of(service, (await service.create(ME)).sandbox_id) == "a"


async def test_a_create_waits_when_capacity_shrinks_and_is_admitted_when_a_host_joins():
    cluster = Cluster(Host("a", 1), Host("b", 1))
    created: list[str] = []

    async def create() -> None:
        created.append((await service.create(ME)).sandbox_id)

    async with serving(cluster) as service, anyio.create_task_group() as tasks:
        await create()
        cluster.lose({"a": "b", "b": "a"}[host_of(service, created[0])], "powered off")
        tasks.start_soon(create)
        await anyio.wait_all_tasks_blocked()
        assert (len(created), service.admission.waiting) == (1, 1)
        cluster.join(Host("c", 1))
        await anyio.wait_all_tasks_blocked()
        assert host_of(service, created[1]) == "c"


async def test_a_create_that_waits_too_long_for_a_host_names_the_capacity():
    async with serving(Cluster(Host("a", 0)), queue_timeout_s=0.01) as service:
        with pytest.raises(QueueTimeout) as caught:
            await service.create(ME)
    assert caught.value.fields == {"setting": "capacity.machines", "value": 0, "waited_s": 0.01}


async def test_a_create_says_why_no_host_can_take_it():
    async with serving(Cluster(Host("a", 1, version=None))) as service:
        with pytest.raises(NoHost, match="is built on no host that has room"):
            await service.create(ME)


async def test_a_paused_sandbox_is_lost_with_its_host_and_another_resumes_on_its_own():
    cluster = Cluster(Host("a", 1), Host("b", 1))
    async with serving(cluster) as service:
        on = {host_of(service, box): box for box in [(await service.create(ME)).sandbox_id for _ in range(2)]}
        for box in on.values():
            await service.pause(ME, box)
        cluster.lose("a", "unreachable")
        with pytest.raises(MachineLost, match="its host a was lost: unreachable"):
            await service.resume(ME, on["a"])
        await service.resume(ME, on["b"])
        assert host_of(service, on["b"]) == "b"


async def test_each_host_has_its_own_pool_and_builds():
    hosts = [Host("a", 3, "v1"), Host("b", 3, "v2")]
    cluster = Cluster()
    limits = PoolLimits(min_ready=1, max_ready=1, max_starting=1, memory_mb=4096, max_age_s=1000, idle_s=600)
    with anyio.fail_after(20):
        async with AsyncExitStack() as stack:
            pools = [await stack.enter_async_context(Pool(host, Builds(host), limits)) for host in hosts]
            for host, pool in zip(hosts, pools, strict=True):
                cluster.join(host, pool)
            await anyio.wait_all_tasks_blocked()
            async with cluster.acquire(REQUEST) as first:
                hosts[0].machines = 0  # the next one goes to the other host
                async with cluster.acquire(REQUEST) as second:
                    leased = {lease.host.name: (lease.version, lease.timings.restore_s) for lease in (first, second)}
    assert leased == {"a": ("v1", 0.0), "b": ("v2", 0.0)}


async def test_pooled_machines_of_a_lost_host_are_discarded(caplog: pytest.LogCaptureFixture):
    host = Host("a", 1)
    limits = PoolLimits(min_ready=1, max_ready=1, max_starting=1, memory_mb=4096, max_age_s=1000, idle_s=600)
    with anyio.fail_after(20):
        async with Pool(host, Builds(host), limits) as pool:
            await anyio.wait_all_tasks_blocked()
            host.vanish("unreachable")
            await anyio.wait_all_tasks_blocked()
            stats = pool.stats().templates[TEMPLATE]
    assert (stats.ready, stats.failed) == (0, 1)
    assert "Host a was lost: unreachable" in (stats.last_error or "")
    assert "Traceback" not in caplog.text
