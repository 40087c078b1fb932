"""Machines of sandboxes in which nothing runs stand still, and continue when they are used."""

from collections.abc import AsyncIterator

import anyio
import pytest

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import MachineLost
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from tests.unit.fakes import FakeAgent, FakeProvider, finished
from tests.waiting import HANG_S
from vmm.errors import MachineLost as NoMachine

ME = "me"
SOON_S = 0.01


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def service(provider: FakeProvider) -> AsyncIterator[SandboxService]:
    settings = Settings(lifetime={"standstill_s": SOON_S})
    with anyio.fail_after(HANG_S):
        async with SandboxService(provider, settings) as service:
            yield service


async def asked(agent: FakeAgent) -> None:
    """Wait until the host has asked whether anything runs, and has acted on the answer."""
    await agent.rest_asked.wait()
    await anyio.wait_all_tasks_blocked()


async def test_a_sandbox_that_was_never_used_stands_still(service: SandboxService, provider: FakeProvider):
    await service.create(ME)
    agent = provider.agents[0]
    await asked(agent)
    assert agent.machine.stands_still


async def test_a_run_lets_the_machine_continue_and_it_stands_still_again(
    service: SandboxService, provider: FakeProvider
):
    box = await service.create(ME)
    agent = provider.agents[0]
    await asked(agent)
    waiting = anyio.Event()
    agent.plans["wait"] = [waiting, finished()]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run, CodeRun(ME, "wait", box.sandbox_id))
        await agent.running.wait()
        assert not agent.machine.stands_still
        waiting.set()
    await asked(agent)
    assert agent.machine.stands_still


async def test_writing_a_file_lets_the_machine_continue(service: SandboxService, provider: FakeProvider):
    box = await service.create(ME)
    agent = provider.agents[0]
    await asked(agent)
    await service.write(ME, box.sandbox_id, "/workspace/a", b"a")
    assert not agent.machine.stands_still


async def test_a_machine_in_which_something_runs_is_asked_again_later(service: SandboxService, provider: FakeProvider):
    await service.create(ME)
    agent = provider.agents[0]
    agent.rests = False
    await asked(agent)
    assert not agent.machine.stands_still
    agent.rests = True
    await asked(agent)
    assert agent.machine.stands_still


async def test_a_machine_that_cannot_stand_still_is_still_usable(service: SandboxService, provider: FakeProvider):
    box = await service.create(ME)
    agent = provider.agents[0]
    agent.machine.pause_error = NoMachine("it did not stop")
    await asked(agent)
    assert (await service.run(CodeRun(ME, "1", box.sandbox_id))).status == "ok"


async def test_a_machine_that_ends_while_it_stands_still_is_lost(service: SandboxService, provider: FakeProvider):
    box = await service.create(ME)
    agent = provider.agents[0]
    await asked(agent)
    agent.machine.ended.set()
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(MachineLost):
        await service.run(CodeRun(ME, "1", box.sandbox_id))


async def test_a_sandbox_that_stands_still_is_closed(service: SandboxService, provider: FakeProvider):
    box = await service.create(ME)
    await asked(provider.agents[0])
    assert await service.close(ME, box.sandbox_id)
    assert provider.alive == 0


async def test_without_the_setting_no_machine_is_asked(provider: FakeProvider):
    async with SandboxService(provider, Settings(lifetime={"standstill_s": 0})) as service:
        await service.create(ME)
        agent = provider.agents[0]
        with anyio.move_on_after(10 * SOON_S) as waited:
            await agent.rest_asked.wait()
        assert waited.cancelled_caught
