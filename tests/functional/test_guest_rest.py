"""When a real agent says that nothing runs in its machine, so that the machine may stand still."""

from collections.abc import AsyncIterator

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import WarmUp
from tests.functional.guest_harness import active, agent_client, command, run
from tests.waiting import HANG_S

THREAD = """
import threading
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
"""


@pytest.fixture(autouse=True)
async def limit() -> AsyncIterator[None]:
    with anyio.fail_after(HANG_S):
        yield


@pytest.fixture(params=[(), ("--one-kernel",)], ids=["zygote", "one kernel"])
async def machine(request: pytest.FixtureRequest) -> AsyncIterator[AgentClient]:
    async with agent_client(WarmUp("python"), *request.param) as client:
        yield client


async def test_a_machine_is_at_rest_before_and_after_runs(machine: AgentClient):
    assert await machine.at_rest()
    await run(machine, "x = 1")
    await command(machine, "true")
    assert await machine.at_rest()


async def test_a_command_and_a_process_that_it_leaves_running_are_not_at_rest(machine: AgentClient):
    async with active(machine, "echo begun; sleep 1000") as running:
        assert not await machine.at_rest()
        await running.run.stop()
        await running.end()
    assert await machine.at_rest()
    await command(machine, "sleep 1000 </dev/null >/dev/null 2>&1 &", keep_processes=True)
    assert not await machine.at_rest()
    await command(machine, "pkill -x sleep")
    assert await machine.at_rest()


async def test_code_and_a_thread_that_it_leaves_running_are_not_at_rest(machine: AgentClient):
    async with active(machine, "print('begun', flush=True); input()", "code", stdin_open=True) as waiting:
        assert not await machine.at_rest()
        await waiting.run.stop()
        await waiting.end()
    await run(machine, THREAD)
    assert not await machine.at_rest()
    await run(machine, "stop.set(); thread.join()")
    assert await machine.at_rest()


async def test_a_kernel_that_replaces_another_comes_to_rest(machine: AgentClient):
    await run(machine, "import os; os._exit(1)")
    await run(machine, "1")
    assert await machine.at_rest()
