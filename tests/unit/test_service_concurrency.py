"""Several runs of one sandbox at once, and input that is sent to them."""

from collections.abc import AsyncIterator

import anyio
import pytest

from guest.client.messages import Output
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import (
    BadRequest,
    LimitReached,
    MachineLost,
    SandboxBusy,
    SandboxNotFound,
    StdinClosed,
    StdinFull,
)
from mcp_sandbox.runs.requests import CodeRun, CommandRun, RunRequest
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunProgress
from tests.unit.fakes import FakeProvider

ME = "me"


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def service(provider: FakeProvider) -> AsyncIterator[SandboxService]:
    with anyio.fail_after(20):
        async with SandboxService(provider, Settings(runs={"concurrent": 3})) as service:
            yield service


@pytest.fixture
async def box(service: SandboxService) -> str:
    return (await service.create(ME)).sandbox_id


async def start(service: SandboxService, request: RunRequest) -> str:
    view = await service.run_for_client(request, background=True)
    assert isinstance(view, RunProgress)
    return view.run_id


async def test_commands_and_code_run_beside_a_background_command(service: SandboxService, box: str):
    assert await start(service, CommandRun(ME, "forever", box)) == "run-1"
    assert (await service.run(CommandRun(ME, "ls", box))).run_id == "run-2"
    assert (await service.run(CodeRun(ME, "1", box))).run_id == "run-3"
    assert await start(service, CommandRun(ME, "forever", box)) == "run-4"
    (view,) = service.sandboxes(ME)
    assert (view.state, view.run_ids) == ("running", ["run-1", "run-4"])
    assert (await service.stop_run(ME, box, "run-1")).stopped
    assert service.sandboxes(ME)[0].run_ids == ["run-4"]
    assert (await service.stop_run(ME, box, "run-4")).stopped
    assert service.sandboxes(ME)[0].state == "ready"


async def test_commands_run_beside_background_code_and_other_code_is_refused(service: SandboxService, box: str):
    await start(service, CodeRun(ME, "forever", box))
    assert (await service.run(CommandRun(ME, "ls", box))).status == "ok"
    with pytest.raises(SandboxBusy, match=r"run-1 has been running"):
        await service.run(CodeRun(ME, "1", box))


async def test_code_waits_for_code_and_commands_do_not(service: SandboxService, provider: FakeProvider, box: str):
    ended: list[str] = []

    async def run(request: RunRequest) -> None:
        ended.append((await service.run(request)).run_id)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, CodeRun(ME, "forever", box))
        await provider.agent.running.wait()
        tasks.start_soon(run, CodeRun(ME, "1", box))
        tasks.start_soon(run, CommandRun(ME, "ls", box))
        await anyio.wait_all_tasks_blocked()
        assert ended == ["run-2"]
        await service.stop_run(ME, box, "run-1")
    assert ended == ["run-2", "run-1", "run-3"]


async def test_more_runs_than_a_sandbox_may_have_are_refused(service: SandboxService, box: str):
    for _ in range(3):
        await start(service, CommandRun(ME, "forever", box))
    for request in (CommandRun(ME, "ls", box), CodeRun(ME, "1", box)):
        with pytest.raises(LimitReached, match=r"runs\.concurrent = 3"):
            await service.run(request)


async def test_each_active_run_counts_against_the_limit_of_its_owner(provider: FakeProvider):
    with anyio.fail_after(20):
        async with SandboxService(provider, Settings(limits={"owner_runs": 2})) as service:
            box = (await service.create(ME)).sandbox_id
            for _ in range(2):
                await start(service, CommandRun(ME, "forever", box))
            with pytest.raises(LimitReached, match=r"limits\.owner_runs = 2"):
                await service.run(CommandRun(ME, "ls", box))


async def test_a_fork_or_pause_names_all_active_runs(service: SandboxService, box: str):
    for _ in range(3):
        await start(service, CommandRun(ME, "forever", box))
    for call in (service.fork(ME, box, 1), service.pause(ME, box)):
        with pytest.raises(SandboxBusy, match=r"run-1 has been .* Also active: run-2, run-3\."):
            await call
    for number in (1, 2, 3):
        await service.stop_run(ME, box, f"run-{number}")
    await service.pause(ME, box)


async def test_closing_a_sandbox_ends_all_its_runs(service: SandboxService, provider: FakeProvider, box: str):
    for _ in range(3):
        await start(service, CommandRun(ME, "forever", box))
    assert await service.close(ME, box)
    assert provider.alive == 0


async def test_the_output_of_each_run_can_be_read_after_the_machine_was_lost(
    service: SandboxService, provider: FakeProvider
):
    for name in ("a", "b"):
        provider.plans[name] = [Output("stdout", f"{name}\n"), anyio.Event()]
    box = (await service.create(ME)).sandbox_id
    runs = {name: await start(service, CommandRun(ME, name, box)) for name in ("a", "b")}
    await anyio.wait_all_tasks_blocked()
    provider.agent.machine.ended.set()
    await anyio.wait_all_tasks_blocked()
    for name, run_id in runs.items():
        view = await service.read_output(ME, box, run_id, offset=0, wait_s=0)
        assert (view.page.text, view.result) == (f"{name}\n", None)
    with pytest.raises(MachineLost):
        await service.run(CodeRun(ME, "1", box))


# -- input -------------------------------------------------------------------------------------------------


async def reader(service: SandboxService, box: str | None) -> RunProgress:
    view = await service.run_for_client(CommandRun(ME, "forever", box, stdin_open=True))
    assert isinstance(view, RunProgress), "a run with open input is answered with its id at once"
    return view


async def test_input_is_sent_in_parts_and_closed(service: SandboxService, provider: FakeProvider, box: str):
    run_id = (await reader(service, box)).run_id
    sent = await service.write_stdin(ME, box, run_id, b"x" * 25)
    assert (sent.sent_bytes, sent.closed) == (25, False)
    assert (await service.write_stdin(ME, box, run_id, b"last", close=True)).closed
    assert provider.agent.input == b"x" * 25 + b"last<end>"
    with pytest.raises(StdinClosed, match="its input was closed"):
        await service.write_stdin(ME, box, run_id, b"more")


async def test_a_run_without_open_input_or_that_is_over_takes_none(service: SandboxService, box: str):
    closed = await start(service, CommandRun(ME, "forever", box))
    with pytest.raises(StdinClosed, match="not started with stdin_open"):
        await service.write_stdin(ME, box, closed, b"x")
    run_id = (await reader(service, box)).run_id
    await service.stop_run(ME, box, run_id)
    with pytest.raises(StdinClosed, match="it is over"):
        await service.write_stdin(ME, box, run_id, b"x")


async def test_a_run_that_does_not_read_takes_no_more_input_for_now(
    service: SandboxService, provider: FakeProvider, box: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mcp_sandbox.sandboxes.run_calls.TAKE_INPUT_S", 0.01)
    run_id = (await reader(service, box)).run_id
    provider.agent.takes_input = False
    with pytest.raises(StdinFull, match="0 of 3 bytes"):
        await service.write_stdin(ME, box, run_id, b"abc", close=True)
    provider.agent.takes_input = True
    await service.write_stdin(ME, box, run_id, b"abc", close=True)
    assert provider.agent.input == b"abc<end>"


async def test_only_the_owner_sends_input(service: SandboxService, box: str):
    run_id = (await reader(service, box)).run_id
    with pytest.raises(SandboxNotFound):
        await service.write_stdin("other", box, run_id, b"x")


async def test_input_is_given_or_sent_and_not_both(service: SandboxService, box: str):
    for request in (
        CommandRun(ME, "cat", box, stdin="x", stdin_open=True),
        CodeRun(ME, "input()", box, stdin="x", stdin_open=True),
    ):
        with pytest.raises(BadRequest, match="not both"):
            await service.run_for_client(request)
