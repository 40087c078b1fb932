"""Long runs of real code in a real agent that runs on this host."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from mcp_sandbox.config import Settings
from mcp_sandbox.machines.provider import Lease, LeaseTimings, MachineRequest
from mcp_sandbox.machines.unique import new_identity
from mcp_sandbox.runs.requests import CodeRun, CommandRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunProgress
from templates.catalogue import Catalogue
from tests.functional.guest_harness import agent_client
from tests.unit.fakes import FACTS, FakeMachine, FakeProvider
from tests.waiting import HANG_S

ME = "me"
TICKS = "import time\nn = 0\nwhile True:\n    n += 1\n    print('tick', n, flush=True)\n    time.sleep(0.02)"
STUBBORN = (
    "import time\nprint('begun', flush=True)\n"
    "while True:\n    try:\n        time.sleep(1)\n    except KeyboardInterrupt:\n        pass"
)


class NativeProvider(FakeProvider):
    """Provides agents that run on this host."""

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        async with agent_client() as agent:
            template = Catalogue().load(request.template)
            yield Lease(FakeMachine(), agent, template, FACTS, LeaseTimings(0, 0), new_identity())


@pytest.fixture
async def service() -> AsyncIterator[SandboxService]:
    with anyio.fail_after(HANG_S):
        async with SandboxService(NativeProvider(), Settings()) as service:
            yield service


async def started(service: SandboxService, box: str, code: str) -> RunProgress:
    view = await service.run_for_client(CodeRun(ME, code, box), background=True)
    assert isinstance(view, RunProgress)
    while not view.page.text:
        await anyio.lowlevel.checkpoint()
        view = await service.read_output(ME, box, view.run_id, offset=0, wait_s=0)
    return view


async def printed(service: SandboxService, box: str, code: str) -> str:
    return (await service.run(CodeRun(ME, code, box))).stdout.head.strip()


async def test_output_comes_while_code_runs_and_a_stop_keeps_its_variables(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    view = await started(service, box, TICKS)
    read, offset = "", 0
    while "tick 20\n" not in read:
        view = await service.read_output(ME, box, view.run_id, offset=offset, wait_s=0.05)
        assert view.result is None
        read, offset = read + view.page.text, view.page.end
    result = await service.stop_run(ME, box, view.run_id)
    assert (result.status, result.state, result.stopped) == ("interrupted", "kept", True)
    last = await service.read_output(ME, box, view.run_id, offset=offset, wait_s=0)
    ticks = (read + last.page.text).split("\n")[:-1]
    assert ticks == [f"tick {n + 1}" for n in range(len(ticks))]
    assert int(await printed(service, box, "print(n)")) in (len(ticks), len(ticks) + 1)


async def test_a_command_in_the_background_is_read_and_stopped_as_code_is(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    line = "export X=1; n=0; while true; do n=$((n + 1)); echo tick $n; sleep 0.01; done"
    view = await service.run_for_client(CommandRun(ME, line, box), background=True)
    assert isinstance(view, RunProgress)
    while "tick 3\n" not in view.page.text:
        view = await service.read_output(ME, box, view.run_id, offset=0, wait_s=0.05)
        assert view.result is None
    result = await service.stop_run(ME, box, view.run_id)
    assert (result.status, result.state, result.stopped) == ("interrupted", "kept", True)
    after = await service.run(CommandRun(ME, "echo ${X-none}", box))
    assert (after.stdout.head, after.lost_before) == ("none\n", False)


async def test_a_cancelled_call_interrupts_real_code_and_keeps_its_variables(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run, CodeRun(ME, TICKS, box))
        while not service.sandboxes(ME)[0].run_ids or not len(service.alive()[0].runs.active["run-1"].log):
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    after = await service.run(CodeRun(ME, "print(n > 0)", box))
    assert (after.stdout.head, after.lost_before) == ("True\n", False)


async def test_code_that_cannot_be_interrupted_is_killed_and_the_next_run_says_so(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    await service.run(CodeRun(ME, "x = 1", box))
    view = await started(service, box, STUBBORN)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.stop_run, ME, box, view.run_id)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()  # the client never gets the result
    after = await service.run(CodeRun(ME, "print('x' in globals())", box))
    assert (after.stdout.head, after.lost_before) == ("False\n", True)


async def test_output_beyond_what_is_sent_live_is_missing_in_the_log_and_whole_in_a_file(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    result = await service.run(CodeRun(ME, "for n in range(200_000): print('line', n)", box))
    assert result.stdout.spill is not None
    whole = await service.read_all(ME, box, result.stdout.spill)
    assert whole == b"".join(b"line %d\n" % n for n in range(200_000))
    assert result.stdout.omitted_bytes == len(whole) - 2 * 8192
    view = await service.run_for_client(CodeRun(ME, "for n in range(200_000): print('line', n)", box), background=True)
    assert isinstance(view, RunProgress)
    read, offset = "", 0
    while view.result is None or view.page.end < view.page.size:
        view = await service.read_output(ME, box, view.run_id, offset=offset, wait_s=10)
        read, offset = read + view.page.text, view.page.end
    missing = len(whole) - 512 * 1024 - 8192
    assert f"[… {missing:,} bytes of stdout are missing here …]" in read
    assert read.endswith("line 199999\n")
