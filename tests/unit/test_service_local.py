"""Leases of machines on this host: which request gets one, and in which condition."""

import errno
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from anyio.abc import ByteStream

from guest.client import AgentClient
from guest.client.messages import Device, Identity, Refreshed, WarmUp
from guest.client.streams import ServeStream
from guest.errors import AgentTimeout, RequestRefused
from mcp_sandbox.errors import (
    CannotFreeze,
    DiskFull,
    HostNotReady,
    NetworkUnsupported,
    SandboxError,
    StartFailed,
    StateLost,
    TemplateDamaged,
    TemplateNotBuilt,
    UnknownTemplate,
)
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.machines.provider import MachineRequest
from mcp_sandbox.machines.unique import go_online
from mcp_sandbox.operating.recovery import OWNED
from templates.build import Builder, BuiltTemplate
from templates.catalogue import Catalogue
from templates.locks import is_held
from templates.store import Entry, Store
from tests.unit.fakes import REQUEST, TEMPLATE, FakeMachine
from vmm.errors import LaunchFailed, SnapshotFailed, ToolFailed
from vmm.process_table import of_pid
from vmm.types import (
    Accel,
    Capabilities,
    Exit,
    GuestKernel,
    Isolation,
    MachineSpec,
    NetworkDevice,
    NetworkMode,
    Probe,
    Snapshot,
)

WARM_UP = WarmUp(code="import numpy")

if TYPE_CHECKING:
    from vmm.driver import Machine, SnapshotDriver


class Clone(FakeMachine):
    device: NetworkDevice | None = None

    async def connect(self) -> None:
        await anyio.lowlevel.checkpoint()


class StubDriver:
    """Starts nothing and counts calls."""

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

    async def snapshot(self, machine: "Machine", dst: Path, *, keep: bool) -> Snapshot:
        assert keep
        await anyio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return Snapshot(self.name, dst)

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
            machine = Clone()
            if spec.network is NetworkMode.NAT:
                at = IPv4Interface(f"198.18.0.{4 * len(self.specs) + 2}/30")
                machine.device = NetworkDevice((IPv4Address("9.9.9.9"),), at, at.ip - 1)
            yield machine
        finally:
            self.alive -= 1


class StubBuilder:
    def __init__(self, path: Path) -> None:
        root, boot, snapshot = self.stored = [path / name for name in ("image", "kernel", "snapshot")]
        for entry in self.stored:
            entry.mkdir(parents=True)
        self.found: BuiltTemplate | None = BuiltTemplate(
            Catalogue().load(TEMPLATE),
            root / "root.erofs",
            GuestKernel(boot / "vmlinuz", boot / "initramfs"),
            WARM_UP,
            Snapshot("stub", snapshot),
            "v1",
        )
        (root / "root.erofs").touch()
        self.lookups = 0
        self.builds = 0
        self.broken: list[Entry] = []
        self.checking = anyio.Event()
        self.checked: anyio.Event | None = None  # checks wait for it

    def stamp(self) -> tuple[int, ...]:
        return (self.builds,)

    async def find(self, *_: object) -> BuiltTemplate | None:
        self.lookups += 1
        return self.found

    async def damaged(self, _built: BuiltTemplate) -> list[Entry]:
        self.checking.set()
        if self.checked is not None:
            await self.checked.wait()
        return self.broken


class StubAgent:
    def __init__(self, identity: Identity | None, skew_s: float) -> None:
        self.asked: list[str | Identity] = [identity] if identity else []  # in order, with the refreshes
        self.refreshed = Refreshed(skew_s, entropy_credited=True, hostname_set=True)
        self.warmed: list[WarmUp] = []
        self.rehearsal_error: Exception | None = None
        self.settling_error: Exception | None = None
        self.open_streams = 0

    @property
    def identities(self) -> list[Identity]:
        return [asked for asked in self.asked if isinstance(asked, Identity)]

    @property
    def identity(self) -> Identity:
        return self.identities[0]

    async def rehearse(self, _timeout_s: float) -> None:
        await anyio.lowlevel.checkpoint()
        self.asked.append("rehearse")
        if self.rehearsal_error is not None:
            raise self.rehearsal_error

    async def settle(self, _timeout_s: float) -> None:
        await anyio.lowlevel.checkpoint()
        self.asked.append("settle")
        if self.settling_error is not None:
            raise self.settling_error

    async def warm(self, warm_up: WarmUp, timeout_s: float) -> None:
        await anyio.lowlevel.checkpoint()
        self.warmed.append(warm_up)

    async def ping(self) -> None:
        await anyio.lowlevel.checkpoint()

    def allow_streams(self, _serve: ServeStream) -> None: ...

    async def close_streams(self) -> int:
        await anyio.lowlevel.checkpoint()
        closed, self.open_streams = self.open_streams, -1  # so that a test can tell: none may be opened now
        return closed

    async def refresh(self, identity: Identity) -> Refreshed:
        await anyio.lowlevel.checkpoint()
        self.asked.append(identity)
        return self.refreshed


async def nothing(_stream: ByteStream) -> None:
    await anyio.lowlevel.checkpoint()


WAITING = replace(REQUEST, rehearse=True)
ONLINE = MachineRequest(TEMPLATE, network=NetworkMode.PROXY, serve_stream=nothing)
VIRTUAL_MACHINES = Capabilities(Isolation.VM, snapshot=True)


class LateAgent(StubAgent):
    """An agent whose first refresh was slow, so that its clock is late. The next refresh is fast."""

    async def refresh(self, identity: Identity) -> Refreshed:
        await anyio.lowlevel.checkpoint()
        return Refreshed(0.01, entropy_credited=True, hostname_set=True)


class Bench:
    """A provider over stubs, and the agents that it greeted."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = StubDriver()
        self.run_dir = tmp_path / "run"
        self.builder = StubBuilder(tmp_path / "store")
        self.agents: list[StubAgent] = []
        self.skew_s = 0.0
        self.kind = StubAgent
        self.refused: set[str] = set()  # parts of a refresh that the machine's kernel does not allow
        self.greeting: Exception | None = None
        self.rehearsal_error: Exception | None = None
        self.settling_error: Exception | None = None
        self.serve_stream: ServeStream | None = None  # of the last machine
        self.seeking: bool | None = None  # whether garbage before the last greeting was allowed
        monkeypatch.setattr(AgentClient, "open", self._open)
        driver, builder = cast("SnapshotDriver", self.driver), cast("Builder", self.builder)
        self.builds = Builds(driver, builder, Catalogue())
        self.provider = LocalProvider(driver, self.builds, max_restores=2, run_dir=self.run_dir)

    @asynccontextmanager
    async def _open(
        self,
        _stream: Any,
        *,
        timeout_s: float,
        identity: Identity | None,
        seeking: bool,
        serve_stream: ServeStream | None,
    ) -> AsyncIterator[StubAgent]:
        if self.greeting is not None:
            raise self.greeting
        self.seeking = seeking
        self.serve_stream = serve_stream
        agent = self.kind(identity, self.skew_s)
        agent.rehearsal_error, agent.settling_error = self.rehearsal_error, self.settling_error
        agent.refreshed = replace(agent.refreshed, **dict.fromkeys(self.refused, False))
        self.agents.append(agent)
        yield agent


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


async def test_a_machine_is_unique_before_it_is_leased(bench: Bench):
    for _ in range(3):
        async with bench.provider.acquire(REQUEST) as lease:
            assert bench.driver.alive == 1
            assert (lease.host.driver, lease.host.isolation, lease.host.accel) == ("stub", "kernel", "kvm")
    assert bench.driver.alive == 0
    identities = [agent.identity for agent in bench.agents]
    assert len(identities) == 3
    for field in ("hostname", "machine_id", "entropy"):
        assert len({getattr(identity, field) for identity in identities}) == 3
    assert all(len(identity.entropy) == 64 for identity in identities)
    assert [spec.id for spec in bench.driver.specs] == [identity.hostname for identity in identities]


async def test_the_clock_is_set_again_after_a_slow_refresh(bench: Bench):
    bench.skew_s, bench.kind = -8.2, LateAgent
    async with bench.provider.acquire(REQUEST):
        assert bench.driver.alive == 1


@pytest.mark.parametrize("skew_s", [1.5, -1.5])
async def test_a_machine_with_a_wrong_clock_is_not_leased(bench: Bench, skew_s: float):
    bench.skew_s = skew_s
    with pytest.raises(SandboxError, match="clock"):
        async with bench.provider.acquire(REQUEST):
            pytest.fail("a machine was leased")
    assert bench.driver.alive == 0


@pytest.mark.parametrize(("refused", "word"), [("entropy_credited", "entropy"), ("hostname_set", "name")])
async def test_a_virtual_machine_that_is_not_unique_is_not_leased(bench: Bench, refused: str, word: str):
    bench.driver.capabilities = VIRTUAL_MACHINES
    bench.refused = {refused}
    with pytest.raises(SandboxError, match=f"did not get its own {word}"):
        async with bench.provider.acquire(REQUEST):
            pytest.fail("a machine was leased")
    assert bench.driver.alive == 0


async def test_a_machine_without_its_own_kernel_needs_no_entropy(bench: Bench):
    bench.refused = {"entropy_credited", "hostname_set"}
    async with bench.provider.acquire(REQUEST):
        assert bench.driver.alive == 1


@pytest.mark.parametrize("serial", [True, False])
async def test_only_a_machine_with_a_serial_port_may_send_garbage_before_its_greeting(bench: Bench, serial: bool):
    bench.driver.capabilities = replace(bench.driver.capabilities, isolation=Isolation.VM, serial=serial)
    async with bench.provider.acquire(REQUEST):
        assert bench.seeking is serial


async def test_a_machine_from_a_snapshot_is_not_warmed_up_again(bench: Bench):
    async with bench.provider.acquire(REQUEST):
        assert bench.driver.started == ["restored"]
        assert bench.agents[0].warmed == []


async def test_a_machine_rehearses_before_it_is_made_unique_and_settles_after(bench: Bench):
    async with bench.provider.acquire(WAITING) as lease:
        assert bench.agents[0].asked == ["rehearse", lease.identity, "settle"]
        assert lease.identity.reseed


async def test_a_machine_that_is_needed_now_does_not_rehearse(bench: Bench):
    async with bench.provider.acquire(REQUEST) as lease:
        assert bench.agents[0].asked == [lease.identity]


async def test_a_machine_whose_rehearsal_fails_is_leased_without(bench: Bench):
    bench.rehearsal_error = RequestRefused("bad_request", "the rehearsal failed: NameError")
    async with bench.provider.acquire(WAITING) as lease:
        assert bench.agents[0].asked == ["rehearse", lease.identity, "settle"]


async def test_a_machine_that_cannot_settle_is_leased_all_the_same(bench: Bench):
    bench.settling_error = RequestRefused("bad_request", "the rehearsal failed: WarmUpFailed")
    async with bench.provider.acquire(WAITING) as lease:
        assert bench.agents[0].asked[1:] == [lease.identity, "settle"]


async def test_a_machine_that_hangs_in_its_rehearsal_is_dropped(bench: Bench):
    bench.rehearsal_error = AgentTimeout("no answer")
    with pytest.raises(SandboxError):
        async with bench.provider.acquire(WAITING):
            pytest.fail("a machine was leased")
    assert bench.driver.alive == 0


async def test_a_virtual_machine_does_not_rehearse(bench: Bench):
    bench.driver.capabilities = VIRTUAL_MACHINES
    async with bench.provider.acquire(WAITING) as lease:
        assert bench.agents[0].asked == [lease.identity]


async def test_a_machine_that_was_just_warmed_up_does_not_rehearse_again(bench: Bench):
    bench.driver.capabilities = Capabilities(Isolation.NAMESPACE, snapshot=False, root="tree")
    assert bench.builder.found is not None
    bench.builder.found = replace(bench.builder.found, snapshot=None)
    async with bench.provider.acquire(WAITING):
        assert "rehearse" not in bench.agents[0].asked


async def test_a_machine_without_a_snapshot_is_launched_and_warmed_up_before_it_is_leased(bench: Bench):
    bench.driver.capabilities = Capabilities(Isolation.NAMESPACE, snapshot=False, root="tree")
    assert bench.builder.found is not None
    bench.builder.found = replace(bench.builder.found, snapshot=None)
    async with bench.provider.acquire(REQUEST):
        assert bench.driver.started == ["launched"]
        assert bench.agents[0].warmed == [WARM_UP]


async def test_a_warm_up_runs_offline_whatever_network_the_machine_gets(bench: Bench):
    bench.driver.capabilities = Capabilities(Isolation.NAMESPACE, snapshot=False, root="tree")
    assert bench.builder.found is not None
    bench.builder.found = replace(bench.builder.found, snapshot=None)
    async with bench.provider.acquire(ONLINE) as lease:
        assert [identity.network for identity in bench.agents[0].identities] == ["none", "proxy"]
        assert lease.identity.network == "proxy"
        assert bench.agents[0].identity.hostname == bench.driver.specs[0].id
    assert bench.driver.alive == 0


async def test_the_host_is_probed_once(bench: Bench):
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(bench.provider.facts)
    assert bench.driver.probes == 1


async def test_a_build_is_looked_up_once(bench: Bench):
    for _ in range(3):
        async with bench.provider.acquire(REQUEST):
            pass
    assert bench.builder.lookups == 1


async def test_a_build_is_looked_up_again_after_another_build(bench: Bench, tmp_path: Path):
    assert bench.builder.found is not None
    first = bench.builder.found
    async with bench.provider.acquire(REQUEST) as before:
        bench.builder.found = replace(first, version="v2")
        assert await bench.builds.version(TEMPLATE) == first.version, "nothing says that there was a build"
        bench.builder.builds += 1
        async with bench.provider.acquire(REQUEST) as after:
            assert (before.version, after.version) == (first.version, "v2")
    bench.builder.found, bench.builder.builds = None, bench.builder.builds + 1
    for _ in range(2):
        with pytest.raises(TemplateNotBuilt):
            await bench.builds.version(TEMPLATE)
    assert bench.builder.lookups == 3, "that there is nothing is remembered, too"


async def test_machines_and_frozen_states_hold_the_entries_they_use(bench: Bench):
    entries = bench.builder.stored
    async with AsyncExitStack() as frozen_for:
        async with bench.provider.acquire(REQUEST) as lease:
            assert all(map(is_held, entries))
            frozen = await frozen_for.enter_async_context(bench.provider.freeze(lease))
        assert all(map(is_held, entries)), "the machine has ended, its state has not"
        async with bench.provider.thaw(frozen, copy=False):
            await frozen_for.aclose()
            assert all(map(is_held, entries))
    assert not any(map(is_held, entries))


async def test_a_failed_start_holds_no_entries(bench: Bench):
    bench.driver.error = SnapshotFailed("no")
    with pytest.raises(SandboxError):
        async with bench.provider.acquire(REQUEST):
            pass
    assert not any(map(is_held, bench.builder.stored))


async def test_a_build_removed_between_lookup_and_hold_is_looked_up_again(bench: Bench, tmp_path: Path):
    good = bench.builder.found
    assert good is not None
    bench.builder.found = replace(good, snapshot=Snapshot("stub", tmp_path / "gone"))
    find = bench.builder.find

    async def find_then_build(*args: object) -> BuiltTemplate | None:
        found = await find(*args)
        bench.builder.found = good
        return found

    bench.builder.find = find_then_build  # type: ignore[method-assign]
    async with bench.provider.acquire(REQUEST):
        assert bench.builder.lookups == 2


async def test_an_unknown_or_unbuilt_template_is_reported(bench: Bench):
    with pytest.raises(UnknownTemplate, match=TEMPLATE):
        await bench.provider.acquire(MachineRequest("nonsense")).__aenter__()
    bench.builder.found = None
    with pytest.raises(TemplateNotBuilt, match=TEMPLATE):
        await bench.provider.acquire(REQUEST).__aenter__()


async def test_a_request_that_the_driver_cannot_satisfy_is_refused_before_a_machine_starts(bench: Bench):
    with pytest.raises(NetworkUnsupported, match="Driver stub has no network mode nat"):
        await bench.provider.acquire(MachineRequest(TEMPLATE, network=NetworkMode.NAT)).__aenter__()
    assert not bench.driver.started


async def test_one_snapshot_serves_all_network_modes(bench: Bench):
    for request in (REQUEST, ONLINE):
        async with bench.provider.acquire(request) as lease:
            assert (lease.version, lease.network) == ("v1", request.network)
            assert (lease.identity.network, bench.serve_stream) == (request.network, request.serve_stream)
    assert bench.driver.started == ["restored", "restored"]
    assert [spec.network for spec in bench.driver.specs] == [NetworkMode.NONE, NetworkMode.PROXY]
    assert bench.builder.lookups == 1


async def test_a_host_that_cannot_run_machines_says_why_and_names_the_fix(bench: Bench):
    bench.driver.verdict = Probe(usable=False, reason="no emulator", fix="apt install it")
    with pytest.raises(HostNotReady, match="no emulator") as refusal:
        await bench.provider.acquire(REQUEST).__aenter__()
    assert refusal.value.fix == "apt install it"


async def test_errors_of_other_rooms_become_sandbox_errors_and_leave_nothing(bench: Bench):
    bench.driver.error = SnapshotFailed("the state file is cut short")
    with pytest.raises(SandboxError, match="cut short"):
        await bench.provider.acquire(REQUEST).__aenter__()
    bench.driver.error = None
    bench.greeting = AgentTimeout("no hello")
    with pytest.raises(SandboxError, match="no hello"):
        await bench.provider.acquire(REQUEST).__aenter__()
    assert bench.driver.alive == 0


async def test_a_start_that_fails_because_the_build_is_damaged_says_so(bench: Bench, tmp_path: Path):
    bench.driver.error = LaunchFailed("runsc ended")
    with pytest.raises(StartFailed, match="runsc ended"):
        await bench.provider.acquire(REQUEST).__aenter__()

    async def make(staging: Path) -> dict[str, str]:
        return {}

    bench.builder.broken = [await Store(tmp_path / "store").obtain("snapshot", {}, make)]
    with pytest.raises(TemplateDamaged, match=r"damaged \(snapshot\)") as damaged:
        await bench.provider.acquire(REQUEST).__aenter__()
    assert damaged.value.template == TEMPLATE
    assert bench.driver.alive == 0


async def test_checking_builds_after_failed_starts_delays_no_other_start(bench: Bench):
    bench.builder.checked = anyio.Event()

    async def fail() -> None:
        with pytest.raises(StartFailed):
            await bench.provider.acquire(REQUEST).__aenter__()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            bench.driver.error = LaunchFailed("runsc ended")
            for _ in range(2):  # as many as the provider starts at a time
                tasks.start_soon(fail)
            await anyio.wait_all_tasks_blocked()
            assert bench.builder.checking.is_set()
            bench.driver.error = None
            async with bench.provider.acquire(REQUEST):
                bench.builder.checked.set()


# -- frozen machines ---------------------------------------------------------------------------------------


async def test_the_directory_of_a_frozen_state_names_its_server_and_is_removed_with_the_context(bench: Bench):
    async with bench.provider.acquire(REQUEST) as lease, bench.provider.freeze(lease) as frozen:
        (directory,) = bench.run_dir.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        owner, me = OWNED.fullmatch(directory.name), of_pid(os.getpid())
        assert owner is not None
        assert me is not None
        assert (int(owner[1]), int(owner[2])) == (me.pid, me.started)
        assert frozen.template == lease.template
    assert list(bench.run_dir.iterdir()) == []


async def test_a_frozen_machine_continues_with_the_same_identity_and_its_clock_set(bench: Bench):
    async with bench.provider.acquire(REQUEST) as lease, bench.provider.freeze(lease):
        first, again = bench.agents[0].identities
        assert (again.hostname, again.machine_id, again.reseed) == (first.hostname, first.machine_id, False)
        assert again.entropy != first.entropy


async def test_a_thawed_machine_keeps_its_identity_and_a_copy_gets_its_own(bench: Bench):
    provider = bench.provider
    async with (
        provider.acquire(REQUEST) as lease,
        provider.freeze(lease) as frozen,
        provider.thaw(frozen, copy=False),
        provider.thaw(frozen, copy=True),
    ):
        assert bench.driver.alive == 3
    first, same, copy = (agent.identity for agent in bench.agents)
    assert (same.hostname, same.machine_id, same.reseed) == (first.hostname, first.machine_id, False)
    assert copy.reseed
    assert len({first.hostname, copy.hostname}) == len({first.machine_id, copy.machine_id}) == 2
    assert len({first.entropy, same.entropy, copy.entropy}) == 3
    assert [spec.id for spec in bench.driver.specs] == [first.hostname, same.hostname, copy.hostname]
    assert bench.driver.alive == 0


async def test_a_machine_is_told_about_the_network_device_that_it_has_and_a_copy_about_its_own(bench: Bench):
    bench.driver.capabilities = replace(StubDriver.capabilities, networks=frozenset(NetworkMode))
    async with bench.provider.acquire(MachineRequest(TEMPLATE, network=NetworkMode.NAT)) as lease:
        told = Device(("9.9.9.9",), "198.18.0.6/30", "198.18.0.5")
        assert bench.agents[0].identities[-1].device == told
        async with bench.provider.freeze(lease) as frozen:
            assert bench.agents[0].identities[-1].device == told
            for copy, address in ((False, "198.18.0.10/30"), (True, "198.18.0.14/30")):
                async with bench.provider.thaw(frozen, copy=copy) as thawed:
                    device = bench.agents[-1].identities[-1].device
                    assert device is not None
                    assert (device.address, thawed.identity.device) == (address, device)


async def test_a_machine_in_mode_proxy_is_frozen_without_streams_and_continues_in_its_mode(bench: Bench):
    provider = bench.provider
    async with provider.acquire(ONLINE) as lease:
        bench.agents[0].open_streams = 3
        async with provider.freeze(lease) as frozen:
            assert frozen.closed_streams == 3
            assert bench.agents[0].identities[-1].network == "proxy"
            for copy in (False, True):
                async with provider.thaw(frozen, copy=copy, serve_stream=nothing) as thawed:
                    assert (thawed.network, thawed.identity.network) == (NetworkMode.PROXY, "proxy")
                    assert bench.serve_stream is nothing


async def test_a_machine_that_cannot_be_frozen_may_open_streams_again(bench: Bench):
    async with bench.provider.acquire(ONLINE) as lease:
        bench.driver.error = SnapshotFailed("no room")
        with pytest.raises(SandboxError, match="no room"):
            await bench.provider.freeze(lease).__aenter__()
        agent = bench.agents[0]
        assert agent.open_streams == -1
        assert [identity.network for identity in agent.identities] == ["proxy", "proxy"]


async def test_a_machine_that_went_online_later_is_thawed_with_its_network(bench: Bench):
    async with bench.provider.acquire(REQUEST) as offline:
        lease = await go_online(offline, nothing)
        async with (
            bench.provider.freeze(lease) as frozen,
            bench.provider.thaw(frozen, copy=False, serve_stream=nothing) as thawed,
        ):
            assert (thawed.network, bench.driver.specs[-1].network) == (NetworkMode.PROXY, NetworkMode.PROXY)


async def test_a_machine_without_a_network_is_not_asked_about_its_streams(bench: Bench):
    async with bench.provider.acquire(REQUEST) as lease, bench.provider.freeze(lease) as frozen:
        assert (frozen.closed_streams, bench.agents[0].open_streams) == (0, 0)


async def test_a_machine_is_thawed_with_the_files_it_was_started_from(bench: Bench, tmp_path: Path):
    async with bench.provider.acquire(REQUEST) as lease, bench.provider.freeze(lease) as frozen:
        assert bench.builder.found is not None
        bench.builder.found = replace(bench.builder.found, root=tmp_path / "built anew")
        async with bench.provider.thaw(frozen, copy=True):
            assert bench.driver.specs[0].root == bench.driver.specs[1].root


async def test_a_driver_without_snapshots_cannot_freeze(bench: Bench):
    async with bench.provider.acquire(REQUEST) as lease:
        bench.driver.capabilities = Capabilities(Isolation.NAMESPACE, snapshot=False)
        with pytest.raises(CannotFreeze, match="Driver stub"):
            await bench.provider.freeze(lease).__aenter__()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        ToolFailed(["setpriv", "--secret"], Exit(code=1, detail="runsc: write: No space left on device\nbye")),
        SnapshotFailed("gVisor left nothing"),
    ],
)
async def test_a_full_disk_is_reported_as_such(bench: Bench, error: Exception):
    if isinstance(error, SnapshotFailed):
        error.__cause__ = FULL
    async with bench.provider.acquire(REQUEST) as lease:
        bench.driver.error = error
        with pytest.raises(DiskFull, match="disk is full") as caught:
            await bench.provider.freeze(lease).__aenter__()
    assert "setpriv" not in str(caught.value)


async def test_a_state_that_cannot_be_read_back_is_a_failure_to_freeze(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def fail(_path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with bench.provider.acquire(REQUEST) as lease:
        monkeypatch.setattr("mcp_sandbox.machines.local._file_stamps", fail)
        with pytest.raises(SandboxError, match=r"could not be frozen: .*Too many open files"):
            await bench.provider.freeze(lease).__aenter__()


async def test_a_failed_command_is_logged_and_the_caller_gets_its_last_line(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    async with bench.provider.acquire(REQUEST) as lease:
        bench.driver.error = ToolFailed(["setpriv", "--reuid=7"], Exit(code=1, detail="one\nno such machine\n"))
        with pytest.raises(SandboxError, match=r"could not be frozen: no such machine"):
            await bench.provider.freeze(lease).__aenter__()
    assert "setpriv --reuid=7" in caplog.text


async def test_a_state_whose_files_were_changed_is_lost_and_an_unchanged_one_is_not(bench: Bench):
    async with bench.provider.acquire(REQUEST) as lease, bench.provider.freeze(lease) as frozen:
        bench.driver.error = LaunchFailed("runsc ended")
        with pytest.raises(StartFailed, match="runsc ended"):
            await bench.provider.thaw(frozen, copy=False).__aenter__()
        (directory,) = bench.run_dir.iterdir()
        (directory / "state").write_text("damage")
        with pytest.raises(StateLost, match="changed or removed"):
            await bench.provider.thaw(frozen, copy=False).__aenter__()


async def test_a_damaged_state_and_a_failed_start_are_different_errors(bench: Bench):
    async with bench.provider.acquire(REQUEST) as lease:
        async with bench.provider.freeze(lease) as frozen:
            bench.driver.error = SnapshotFailed("the state file is cut short")
            with pytest.raises(StateLost, match="cut short"):
                await bench.provider.thaw(frozen, copy=False).__aenter__()
            bench.driver.error = OSError("out of memory")
            with pytest.raises(SandboxError, match="could not be started: out of memory"):
                await bench.provider.thaw(frozen, copy=False).__aenter__()
        with pytest.raises(SandboxError, match="could not be frozen: out of memory"):
            await bench.provider.freeze(lease).__aenter__()
    assert list(bench.run_dir.iterdir()) == []
    assert bench.driver.alive == 0
