"""How much CPU a sandbox can take: what the host enforces while a run is on, and between runs."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
import pytest

from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from tests.footprint import groups_of
from tests.functional.machines import Machines
from tests.waiting import HANG_S, assert_soon_empty
from vmm.hierarchy import detect
from vmm.limits import NICENESS, UNUSED_CPUS

pytestmark = [pytest.mark.vm, pytest.mark.rights]

ORDINARY = 100  # percent: the weight of a cgroup that nothing was written to, and of the server's processes beside it
ME = "me"


@dataclass(frozen=True, slots=True)
class Box:
    """A sandbox of the product, and the first process of its machine."""

    service: SandboxService
    sandbox_id: str
    machine: psutil.Process

    async def run(self) -> None:
        """Keep its CPU busy until this is cancelled."""
        await self.service.run(CodeRun(ME, "while True: pass", self.sandbox_id))

    def cpus(self) -> float:
        """How many CPUs it may take, whichever version its cgroups have."""
        files = cpu_files(groups_of(self.machine.pid))
        quota, period = files.get("cpu.max") or files["cpu.cfs_quota_us"] + files["cpu.cfs_period_us"]
        return int(quota) / int(period)

    def weight(self) -> int:
        """Its weight among machines."""
        return weight_of(groups_of(self.machine.pid))


def cpu_files(groups: list[Path]) -> dict[str, list[str]]:
    return {path.name: path.read_text().split() for group in groups for path in group.glob("cpu.*")}


def weight_of(groups: list[Path]) -> int:
    """The weight of a cgroup in percent of an ordinary one's."""
    files = cpu_files(groups)
    return int(files["cpu.weight"][0]) if "cpu.weight" in files else int(files["cpu.shares"][0]) * 100 // 1024


@pytest.fixture
async def box(machines: Machines) -> AsyncIterator[Box]:
    before = set(psutil.Process().children())
    async with SandboxService(machines.provider(), machines.host.settings) as service:
        sandbox_id = (await service.create(ME)).sandbox_id
        [machine] = set(psutil.Process().children()) - before
        yield Box(service, sandbox_id, machine)


@pytest.mark.skipif(detect().version is None, reason=f"no cgroup limits CPU: {detect().describe()}")
async def test_a_sandbox_has_its_cpus_during_a_run_and_little_otherwise_and_always_yields_to_the_server(
    machines: Machines, box: Box
):
    assert weight_of([group.parent for group in groups_of(box.machine.pid)]) < ORDINARY
    unused, cpus = box.weight(), machines.built.template.machine.vcpus
    assert (box.cpus(), unused < ORDINARY) == (UNUSED_CPUS, True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        await assert_soon_empty(lambda: box.cpus() == UNUSED_CPUS, HANG_S)
        assert unused < box.weight() <= ORDINARY
        await assert_soon_empty(lambda: box.cpus() != cpus, HANG_S)  # at first it has more
        assert unused < box.weight() < ORDINARY  # short runs of others come first then
        tasks.cancel_scope.cancel()
    await assert_soon_empty(lambda: (box.cpus(), box.weight()) != (UNUSED_CPUS, unused), HANG_S)


@pytest.mark.skipif(detect().usable, reason="cgroups limit CPU")
async def test_without_cgroups_every_process_of_a_machine_yields_to_the_server(box: Box):
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    every = (box.machine, *box.machine.children(recursive=True))
    assert min(process.nice() for process in every) - ours >= NICENESS
