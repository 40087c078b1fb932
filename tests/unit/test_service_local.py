"""Leases from snapshots of this host: who gets one, and in which condition."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import Identity, Refreshed
from guest.errors import AgentTimeout
from mcp_sandbox.errors import HostNotReady, SandboxError, TemplateNotBuilt, UnknownTemplate
from mcp_sandbox.local import LocalProvider
from templates.build import Builder, BuiltTemplate
from templates.model import load_template
from tests.unit.fakes import TEMPLATE, FakeMachine
from vmm.errors import SnapshotFailed
from vmm.types import Accel, Capabilities, GuestKernel, Isolation, MachineSpec, Probe, Snapshot

if TYPE_CHECKING:
    from vmm.driver import Machine, SnapshotDriver


class Clone(FakeMachine):
    async def connect(self) -> None:
        await anyio.lowlevel.checkpoint()


class StubDriver:
    """Starts nothing, and counts."""

    name = "stub"
    capabilities = Capabilities(Isolation.KERNEL, snapshot=True)

    def __init__(self) -> None:
        self.verdict = Probe(usable=True, reason="", accel=Accel.KVM)
        self.error: Exception | None = None
        self.probes = 0
        self.alive = 0
        self.specs: list[MachineSpec] = []
        self.started: list[str] = []

    async def probe(self) -> Probe:
        self.probes += 1
        await anyio.lowlevel.checkpoint()
        return self.verdict

    async def fingerprint(self) -> str:
        return "stub"

    async def snapshot(self, machine: "Machine", dst: Path) -> Snapshot:
        raise NotImplementedError

    async def aclose(self) -> None: ...

    def restore(self, snapshot: Snapshot, spec: MachineSpec) -> AbstractAsyncContextManager[Clone]:
        return self._start("restored", spec)

    def launch(self, spec: MachineSpec) -> AbstractAsyncContextManager[Clone]:
        return self._start("launched", spec)

    @asynccontextmanager
    async def _start(self, how: str, spec: MachineSpec) -> AsyncIterator[Clone]:
        self.started.append(how)
        self.specs.append(spec)
        if self.error is not None:
            raise self.error
        self.alive += 1
        try:
            yield Clone()
        finally:
            self.alive -= 1


class StubBuilder:
    def __init__(self, path: Path) -> None:
        self.found: BuiltTemplate | None = BuiltTemplate(
            load_template(TEMPLATE), path, GuestKernel(path, path), Snapshot("stub", path)
        )
        self.lookups = 0

    async def find(self, *_: object) -> BuiltTemplate | None:
        self.lookups += 1
        return self.found


class StubAgent:
    def __init__(self, identity: Identity, skew_s: float) -> None:
        self.identity = identity
        self.refreshed = Refreshed(skew_s, clock_settable=True, entropy_credited=True, hostname_set=True)
        self.warmed: list[str] = []

    async def warm(self, code: str, timeout_s: float) -> None:
        await anyio.lowlevel.checkpoint()
        self.warmed.append(code)

    async def refresh(self, identity: Identity) -> Refreshed:
        await anyio.lowlevel.checkpoint()
        return self.refreshed


KERNELS_OF_THEIR_OWN = Capabilities(Isolation.VM, snapshot=True)


class LateAgent(StubAgent):
    """One whose greeting was long on its way, so that its clock is late; the next request is quick."""

    async def refresh(self, identity: Identity) -> Refreshed:
        await anyio.lowlevel.checkpoint()
        return Refreshed(0.01, clock_settable=True, entropy_credited=True, hostname_set=True)


class Bench:
    """A provider over stubs, and the agents it greeted."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = StubDriver()
        self.builder = StubBuilder(tmp_path)
        self.agents: list[StubAgent] = []
        self.skew_s = 0.0
        self.kind = StubAgent
        self.refused: set[str] = set()  # what the machine's kernel does not do at a refresh
        self.greeting: Exception | None = None
        monkeypatch.setattr(AgentClient, "open", self._open)
        driver, builder = cast("SnapshotDriver", self.driver), cast("Builder", self.builder)
        self.provider = LocalProvider(driver, builder, max_restores=2, run_dir=tmp_path / "run")

    @asynccontextmanager
    async def _open(self, _stream: Any, *, timeout_s: float, identity: Identity) -> AsyncIterator[StubAgent]:
        if self.greeting is not None:
            raise self.greeting
        agent = self.kind(identity, self.skew_s)
        agent.refreshed = replace(agent.refreshed, **dict.fromkeys(self.refused, False))
        self.agents.append(agent)
        yield agent


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


async def test_a_lease_is_unique_before_anyone_has_it(bench: Bench):
    for _ in range(3):
        async with bench.provider.acquire(TEMPLATE) as lease:
            assert bench.driver.alive == 1
            assert (lease.facts.driver, lease.facts.isolation, lease.facts.accel) == ("stub", "kernel", "kvm")
    assert bench.driver.alive == 0
    identities = [agent.identity for agent in bench.agents]
    assert len(identities) == 3
    for field in ("hostname", "machine_id", "entropy"):
        assert len({getattr(identity, field) for identity in identities}) == 3
    assert all(len(identity.entropy) == 64 for identity in identities)
    assert [spec.id for spec in bench.driver.specs] == [identity.hostname for identity in identities]


async def test_a_clone_whose_greeting_was_slow_gets_its_clock_set_again(bench: Bench):
    bench.skew_s, bench.kind = -8.2, LateAgent
    async with bench.provider.acquire(TEMPLATE):
        assert bench.driver.alive == 1


@pytest.mark.parametrize("skew_s", [1.5, -1.5])
async def test_a_machine_with_a_wrong_clock_is_not_handed_out(bench: Bench, skew_s: float):
    bench.skew_s = skew_s
    with pytest.raises(SandboxError, match="clock"):
        async with bench.provider.acquire(TEMPLATE):
            pytest.fail("it was handed out")
    assert bench.driver.alive == 0


@pytest.mark.parametrize(("refused", "word"), [("entropy_credited", "entropy"), ("hostname_set", "name")])
async def test_a_virtual_machine_that_is_still_a_twin_is_not_handed_out(bench: Bench, refused: str, word: str):
    bench.driver.capabilities = KERNELS_OF_THEIR_OWN
    bench.refused = {refused}
    with pytest.raises(SandboxError, match=f"no {word} of its own"):
        async with bench.provider.acquire(TEMPLATE):
            pytest.fail("it was handed out")
    assert bench.driver.alive == 0


async def test_a_machine_served_by_the_hosts_kernel_has_nothing_to_reseed(bench: Bench):
    bench.refused = {"entropy_credited", "hostname_set"}
    async with bench.provider.acquire(TEMPLATE):
        assert bench.driver.alive == 1


async def test_a_machine_from_a_snapshot_is_warm_already(bench: Bench):
    async with bench.provider.acquire(TEMPLATE):
        assert bench.driver.started == ["restored"]
        assert bench.agents[0].warmed == []


async def test_a_machine_of_a_driver_without_snapshots_is_launched_and_warmed_before_anyone_has_it(bench: Bench):
    bench.driver.capabilities = Capabilities(Isolation.NAMESPACE, snapshot=False, root="tree")
    assert bench.builder.found is not None
    bench.builder.found = replace(bench.builder.found, snapshot=None)
    async with bench.provider.acquire(TEMPLATE) as lease:
        assert bench.driver.started == ["launched"]
        assert bench.agents[0].warmed == [lease.template.warmup.code]
        assert bench.agents[0].identity.hostname == bench.driver.specs[0].id
    assert bench.driver.alive == 0


async def test_the_host_is_probed_once(bench: Bench):
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(bench.provider.facts)
    assert bench.driver.probes == 1


async def test_a_built_template_is_looked_up_once(bench: Bench):
    for _ in range(3):
        async with bench.provider.acquire(TEMPLATE):
            pass
    assert bench.builder.lookups == 1


async def test_what_is_missing_is_said(bench: Bench):
    with pytest.raises(UnknownTemplate, match=TEMPLATE):
        await bench.provider.acquire("nonsense").__aenter__()
    bench.builder.found = None
    with pytest.raises(TemplateNotBuilt, match="template build"):
        await bench.provider.acquire(TEMPLATE).__aenter__()


async def test_a_host_that_cannot_run_machines_says_why_and_how_to_change_it(bench: Bench):
    bench.driver.verdict = Probe(usable=False, reason="no emulator", fix="apt install it")
    with pytest.raises(HostNotReady, match=r"no emulator.*apt install it"):
        await bench.provider.acquire(TEMPLATE).__aenter__()


async def test_other_rooms_errors_become_ours_and_leave_nothing(bench: Bench):
    bench.driver.error = SnapshotFailed("the state file is cut short")
    with pytest.raises(SandboxError, match="cut short"):
        await bench.provider.acquire(TEMPLATE).__aenter__()
    bench.driver.error = None
    bench.greeting = AgentTimeout("no hello")
    with pytest.raises(SandboxError, match="no hello"):
        await bench.provider.acquire(TEMPLATE).__aenter__()
    assert bench.driver.alive == 0
