"""Sandboxes stand still while nothing runs in them, on every driver."""

import time
from collections.abc import AsyncIterator

import anyio
import pytest

from mcp_sandbox.machines.provider import LeasedMachine
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from tests.functional.machines import Machines
from tests.waiting import HANG_S

pytestmark = pytest.mark.vm

ME = "me"
SOON_S = 0.2
GLANCE_S = 1.0
THREAD = "import threading\nthread = threading.Thread(target=threading.Event().wait, daemon=True)\nthread.start()"


@pytest.fixture
async def service(machines: Machines) -> AsyncIterator[SandboxService]:
    settings = machines.host.settings.changed({"lifetime.standstill_s": SOON_S})
    with anyio.fail_after(HANG_S):
        async with SandboxService(machines.provider(), settings) as service:
            yield service


async def run(service: SandboxService, box: str, code: str) -> str:
    result = await service.run(CodeRun(ME, code, box))
    assert result.status == "ok", result.error
    return result.stdout.head.strip()


def machine_of(service: SandboxService, box: str) -> LeasedMachine:
    lease = next(found.lease for found in service.alive() if found.id == box)
    assert lease is not None
    return lease.machine


async def stands_still(machine: LeasedMachine) -> bool:
    used = (await machine.usage()).cpu_s
    await anyio.sleep(GLANCE_S)
    return (await machine.usage()).cpu_s == used


async def until_still(machine: LeasedMachine) -> None:
    while not await stands_still(machine):
        pass


@pytest.mark.rights
async def test_a_sandbox_stands_still_and_goes_on_with_its_variables_and_the_right_time(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    await run(service, box, "kept = 1")
    await until_still(machine_of(service, box))
    before = time.time()
    kept, seen = (await run(service, box, "import time; print(kept, time.time())")).split()
    assert kept == "1"
    assert before - 1 < float(seen) < time.time() + 1


async def test_a_sandbox_that_stands_still_can_be_copied_and_closed(service: SandboxService, machines: Machines):
    box = (await service.create(ME)).sandbox_id
    await run(service, box, "kept = 1")
    await until_still(machine_of(service, box))
    if machines.host.driver.capabilities.snapshot:
        (copy,) = await service.fork(ME, box, 1)
        assert await run(service, copy.sandbox_id, "print(kept)") == "1"
        await until_still(machine_of(service, box))
    assert await service.close(ME, box)


async def test_a_sandbox_with_a_thread_does_not_stand_still(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    await run(service, box, THREAD)
    lease = next(found.lease for found in service.alive() if found.id == box)
    assert lease is not None
    assert not await lease.agent.at_rest()
