"""The memory and CPUs of a sandbox: what clients may ask for, and what they are restored from."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
from mcp import Client

from guest.client.messages import Size
from mcp_sandbox.config import LimitSettings, Settings
from mcp_sandbox.errors import BadRequest, LimitReached, StartFailed
from mcp_sandbox.machines.provider import MachineRequest
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.sandboxes.sizes import size_within
from mcp_sandbox.serving.server import create_server
from templates.build import BuiltTemplate
from templates.catalogue import Catalogue
from templates.model import MachineSize, Template
from tests.unit.fakes import FACTS, TEMPLATE, FakeProvider
from tests.unit.test_service_local import Bench, bench
from vmm.types import Capabilities, Isolation

if TYPE_CHECKING:
    from tests.unit.test_service_local import StubBuilder

__all__ = ["bench"]

OWN = MachineSize(memory_mb=512, vcpus=1, disk_mb=64)
LARGE = Catalogue().load(TEMPLATE).machine.model_copy(update={"memory_mb": 2048, "vcpus": 2})


def test_a_sandbox_has_the_size_of_its_template_unless_it_asks_for_another():
    limits = LimitSettings(sandbox_memory_mb=2048)
    assert size_within(limits, OWN, None, None) == OWN
    assert size_within(limits, OWN, 2048, None) == OWN.model_copy(update={"memory_mb": 2048})
    assert size_within(LimitSettings(sandbox_memory_mb=256, sandbox_cpus=1), OWN, 512, 1) == OWN


@pytest.mark.parametrize(
    ("memory_mb", "cpus", "problem"),
    [
        (2049, None, "memory_mb must be at least 128 and at most 2048."),
        (127, None, "memory_mb must be at least 128 and at most 2048."),
        (None, 0, "cpus must be at least 1 and at most 1."),
        (None, len(os.sched_getaffinity(0)) + 1, "cpus must be at least 1 and at most 1."),
    ],
)
def test_a_size_beyond_the_operators_limits_is_refused(memory_mb: int | None, cpus: int | None, problem: str):
    with pytest.raises(BadRequest) as refusal:
        size_within(LimitSettings(sandbox_memory_mb=2048, sandbox_cpus=1), OWN, memory_mb, cpus)
    assert str(refusal.value) == problem


def test_no_sandbox_may_ask_for_more_cpus_than_the_host_has():
    with pytest.raises(BadRequest, match=f"at most {len(os.sched_getaffinity(0))}"):
        size_within(LimitSettings(), OWN, None, 65)


async def test_a_snapshot_is_restored_with_another_size_and_the_agent_is_told(bench: Bench):
    async with bench.provider.acquire(MachineRequest(TEMPLATE, size=LARGE)) as lease:
        assert (lease.template.machine, lease.timings.cold) == (LARGE, False)
        async with bench.provider.freeze(lease) as frozen, bench.provider.thaw(frozen, copy=True) as copy:
            assert copy.template.machine == LARGE
    assert bench.driver.started == ["restored", "restored"]
    assert {(spec.memory_mb, spec.vcpus) for spec in bench.driver.specs} == {(2048, 2)}
    assert bench.agents[0].identity.size == Size(2048, 2)


async def test_a_machine_of_its_templates_size_is_told_none(bench: Bench):
    async with bench.provider.acquire(MachineRequest(TEMPLATE)):
        assert bench.agents[0].identity.size is None


class SizedBuilder:
    """Knows a snapshot of the template's own size, and of those that it has built."""

    def __init__(self, stub: "StubBuilder") -> None:
        self._stub = stub
        self.built = anyio.Event()
        self.sizes = [Catalogue().load(TEMPLATE).machine]
        self.kept: list[int] = []

    def stamp(self) -> tuple[int, ...]:
        return (0,)

    async def find(self, template: Template, _driver: object) -> BuiltTemplate | None:
        await anyio.lowlevel.checkpoint()
        assert self._stub.found is not None
        return replace(self._stub.found, template=template) if template.machine in self.sizes else None

    async def build(self, template: Template, _driver: object) -> None:
        await anyio.lowlevel.checkpoint()
        self.sizes.append(template.machine)

    async def remove_resized(self, _template: Template, _driver: object, *, keep: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.kept.append(keep)
        self.built.set()


async def test_a_virtual_machine_boots_if_it_is_the_first_of_its_size_and_the_next_is_restored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bench.driver, "capabilities", Capabilities(Isolation.VM, snapshot=True, fixed_size=True))
    builder = SizedBuilder(bench.builder)
    monkeypatch.setattr(bench.builds, "_builder", builder)
    async with bench.provider as provider:
        async with provider.acquire(MachineRequest(TEMPLATE, size=LARGE)) as lease:
            assert lease.timings.cold
            assert bench.agents[0].warmed
        with anyio.fail_after(5):
            await builder.built.wait()
        async with provider.acquire(MachineRequest(TEMPLATE, size=LARGE)) as lease:
            assert not lease.timings.cold
    assert bench.driver.started == ["launched", "restored"]
    assert {(spec.memory_mb, spec.vcpus) for spec in bench.driver.specs} == {(2048, 2)}
    assert bench.agents[1].identity.size is None  # its snapshot has this size
    assert builder.kept == [3]


@pytest.mark.parametrize("memory_mb", [2047, 2048])
async def test_only_common_sizes_get_a_snapshot_and_one_that_failed_is_not_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, memory_mb: int
):
    tried: list[int] = []

    async def fails(template: Template) -> None:
        tried.append(template.machine.memory_mb)
        raise StartFailed("created", "no memory")

    monkeypatch.setattr(bench.driver, "capabilities", Capabilities(Isolation.VM, snapshot=True, fixed_size=True))
    monkeypatch.setattr(bench.builds, "_builder", SizedBuilder(bench.builder))
    monkeypatch.setattr(bench.builds, "snapshot_of", fails)
    size = LARGE.model_copy(update={"memory_mb": memory_mb})
    async with bench.provider as provider:
        for _ in range(2):
            async with provider.acquire(MachineRequest(TEMPLATE, size=size)) as lease:
                assert lease.timings.cold
            await anyio.wait_all_tasks_blocked()
    assert tried == ([2048] if memory_mb == 2048 else [])


async def test_a_refused_size_names_what_is_allowed():
    own = MachineSize(memory_mb=4096, vcpus=1, disk_mb=64)
    with pytest.raises(BadRequest, match="at most 2048, or 4096, which the template has"):
        size_within(Settings(limits={"sandbox_memory_mb": 2048}).limits, own, 3000, None)


async def test_the_size_in_force_is_in_the_view_and_counts_against_the_limits():
    settings = Settings(limits={"memory_mb": 3000, "queue_timeout_s": 0})
    async with SandboxService(FakeProvider(), settings) as service:
        view = await service.create("me", memory_mb=2048)
        assert (view.memory_mb, view.vcpus, view.cold_start) == (2048, 1, False)
        with pytest.raises(LimitReached, match=r"limits\.memory_mb = 3000"):
            await service.create("me", memory_mb=1024)


async def test_create_sandbox_takes_a_size_and_says_what_is_too_much():
    settings = Settings(limits={"sandbox_memory_mb": 2048})
    server = create_server(settings, str(FACTS), lambda: SandboxService(FakeProvider(), settings))
    async with Client(server) as client:
        made = await client.call_tool("create_sandbox", {"memory_mb": 2048, "cpus": 1})
        refused = await client.call_tool("create_sandbox", {"cpus": 65})
    assert made.structured_content is not None
    assert made.structured_content["memory_mb"] == 2048
    assert refused.is_error
    assert "cpus must be at least 1 and at most" in str(refused.content)
