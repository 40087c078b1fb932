"""Background runs, and the calls that read their output and stop them."""

import gc
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from guest.client.messages import Artifact, Display, Event, Output
from guest.client.reports import CompiledReport
from guest.errors import AgentGone
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import (
    LimitReached,
    MachineLost,
    RunLost,
    RunNotFound,
    SandboxBusy,
    SandboxClosed,
    SandboxNotFound,
)
from mcp_sandbox.machines.provider import Lease, MachineRequest
from mcp_sandbox.runs.output import OutputLog
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.runs.running import LostRun
from mcp_sandbox.sandboxes.lifecycle import End, Ending
from mcp_sandbox.sandboxes.roster import MAX_ENDINGS, MAX_LOST_RUNS, Endings
from mcp_sandbox.sandboxes.sandbox import Observer
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunProgress, RunView
from tests.unit.fakes import FakeProvider, finished

ME = "me"


class Talk:
    """Code that writes a line whenever the test lets it."""

    def __init__(self, provider: FakeProvider, *lines: str) -> None:
        self.gates = [anyio.Event() for _ in lines]
        plan: list[Event | anyio.Event] = []
        for line, gate in zip(lines, self.gates, strict=True):
            plan += [Output("stdout", f"{line}\n"), gate]
        provider.plans["talk"] = [*plan, finished()]


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def service(provider: FakeProvider) -> AsyncIterator[SandboxService]:
    settings = Settings(runs={"foreground_s": 0.05, "kept": 2}, limits={"owner_runs": 2}, output={"page_bytes": 1024})
    with anyio.fail_after(20):
        async with SandboxService(provider, settings) as service:
            yield service


async def started(service: SandboxService, box: str | None, code: str = "forever") -> RunProgress:
    view = await service.run_for_client(CodeRun(ME, code, box), background=True)
    assert isinstance(view, RunProgress)
    return view


async def read(service: SandboxService, view: RunProgress, offset: int = 0, wait_s: float = 5.0) -> RunProgress:
    return await service.read_output(ME, view.sandbox_id, view.run_id, offset=offset, wait_s=wait_s)


async def test_a_background_run_returns_its_id_at_once_and_streams_its_output(
    service: SandboxService, provider: FakeProvider
):
    talk = Talk(provider, "one", "two")
    box = (await service.create(ME)).sandbox_id
    view = await started(service, box, "talk")
    assert (view.run_id, view.result, view.sandbox_id) == ("run-1", None, box)
    assert service.sandboxes(ME)[0].run_ids == ["run-1"]
    await anyio.wait_all_tasks_blocked()
    first = await read(service, view, wait_s=0)
    assert (first.page.text, first.page.end, first.result) == ("one\n", 4, None)
    talk.gates[0].set()
    await anyio.wait_all_tasks_blocked()
    assert (await read(service, view, offset=first.page.end, wait_s=0)).page.text == "two\n"
    talk.gates[1].set()
    last = await read(service, view, offset=8)
    assert last.page.text == ""
    assert last.result is not None
    assert (last.result.status, last.result.stdout.head) == ("ok", "one\ntwo\n")
    assert service.sandboxes(ME)[0].run_ids == []


async def test_waiting_for_output_ends_when_the_page_is_full(service: SandboxService, provider: FakeProvider):
    Talk(provider, "x" * 5000)
    view = await started(service, None, "talk")
    page = await read(service, view, wait_s=3600)
    assert (page.result, page.page.end, page.page.size) == (None, 1024, 5001)


async def test_a_call_that_reaches_foreground_s_leaves_its_run_in_the_background(
    service: SandboxService, provider: FakeProvider
):
    talk = Talk(provider, "so far")
    box = (await service.create(ME)).sandbox_id
    view = await service.run_for_client(CodeRun(ME, "talk", box))
    assert isinstance(view, RunProgress)
    assert (view.page.text, view.result) == ("so far\n", None)
    talk.gates[0].set()
    over = await read(service, view)
    assert over.result is not None
    assert over.result.status == "ok"


async def test_a_run_left_in_the_background_keeps_its_own_deadline(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    view = await service.run_for_client(CodeRun(ME, "forever", box, timeout_s=0.1))
    assert isinstance(view, RunProgress)
    over = await read(service, view)
    assert over.result is not None
    assert (over.result.status, over.result.timed_out_after_s) == ("interrupted", 0.1)


async def test_the_sandbox_of_a_one_off_run_in_the_background_stays(service: SandboxService, provider: FakeProvider):
    talk = Talk(provider, "working")
    view = await service.run_for_client(CodeRun(ME, "talk"))
    assert isinstance(view, RunProgress)
    talk.gates[0].set()
    over = await read(service, view)
    assert over.result is not None
    assert over.result.sandbox_id == view.sandbox_id
    assert [box.sandbox_id for box in service.sandboxes(ME)] == [view.sandbox_id]
    assert await service.close(ME, view.sandbox_id)
    assert provider.alive == 0


async def test_run_waits_for_the_result_however_long_it_takes(service: SandboxService):
    result = await service.run(CodeRun(ME, "forever", timeout_s=0.2))
    assert (result.status, result.sandbox_id) == ("interrupted", None)


async def test_a_busy_sandbox_names_its_background_run(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    await started(service, box)
    for background in (True, False):
        with pytest.raises(SandboxBusy, match=r"run-1 has been running"):
            await service.run_for_client(CodeRun(ME, "1", box), background=background)


async def test_a_waiting_call_is_refused_when_the_run_before_it_moves_to_the_background(
    service: SandboxService, provider: FakeProvider
):
    box = (await service.create(ME)).sandbox_id

    async def second() -> None:
        with pytest.raises(SandboxBusy, match="run-1"):
            await service.run_for_client(CodeRun(ME, "1", box))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run_for_client, CodeRun(ME, "forever", box))
        await provider.agent.running.wait()
        tasks.start_soon(second)


@pytest.mark.parametrize(("code", "state"), [("forever", "kept"), ("stubborn", "lost")])
async def test_a_stopped_run_says_whether_its_state_was_kept(service: SandboxService, code: str, state: str):
    box = (await service.create(ME)).sandbox_id
    view = await started(service, box, code)
    result = await service.stop_run(ME, box, view.run_id)
    assert (result.stopped, result.state, result.timed_out_after_s) == (True, state, None)
    assert (await service.stop_run(ME, box, view.run_id)).stopped  # stopping twice changes nothing
    assert (await service.run(CodeRun(ME, "1", box))).lost_before is False  # stop_run reported the loss


async def test_a_loss_of_variables_that_no_result_reported_is_in_the_next_result(
    service: SandboxService, provider: FakeProvider
):
    box = (await service.create(ME)).sandbox_id
    view = await service.run_for_client(CodeRun(ME, "stubborn", box, timeout_s=0.1))
    assert isinstance(view, RunProgress)
    while service.sandboxes(ME)[0].run_ids:
        await anyio.lowlevel.checkpoint()
    assert (await service.run(CodeRun(ME, "1", box))).lost_before is True
    assert (await service.run(CodeRun(ME, "1", box))).lost_before is False


async def test_only_the_newest_results_are_kept_and_the_error_says_so(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    views = []
    for _ in range(3):
        views.append(await started(service, box, "1"))
        await read(service, views[-1])
    assert (await read(service, views[1])).page.text == "ran\n"
    with pytest.raises(RunNotFound, match=r"is not kept.*last 2"):
        await read(service, views[0])
    with pytest.raises(RunNotFound, match="no run 'run-9'"):
        await service.stop_run(ME, box, "run-9")


async def test_large_results_push_out_older_ones(provider: FakeProvider):
    provider.plans["talk"] = [Output("stdout", "x" * 2000), finished()]
    with anyio.fail_after(20):
        async with SandboxService(provider, Settings(runs={"kept_bytes": 3000})) as service:
            box = (await service.create(ME)).sandbox_id
            first = await started(service, box, "talk")
            await read(service, first)
            second = await started(service, box, "talk")
            assert (await read(service, second)).page.size == 2000
            with pytest.raises(RunNotFound):
                await read(service, first)


BIG = "x" * 4000
KEPT: dict[str, Sequence[Event]] = {
    "the path of an artifact": [Artifact(f"/tmp/outputs/{BIG}", 1)],
    "many artifacts": [Artifact(f"/tmp/outputs/{number}", 1) for number in range(10)],
    "displays": [Display({"text/plain": BIG})],
    "names of forms and files": [Display({BIG[:90]: ""}, (BIG,))],
    "a report": [CompiledReport("compile", "", 0, BIG, "", "", None)],
}


@pytest.mark.parametrize("what", KEPT)
async def test_everything_that_is_kept_of_a_run_counts(provider: FakeProvider, what: str):
    provider.plans["1"] = [*KEPT[what], finished()]
    settings = Settings(runs={"kept_bytes": 7000})  # two results without anything take less
    with anyio.fail_after(20):
        async with SandboxService(provider, settings) as service:
            box = (await service.create(ME)).sandbox_id
            first = await started(service, box, "1")
            await read(service, first)
            await read(service, await started(service, box, "1"))
            with pytest.raises(RunNotFound):
                await read(service, first)


async def test_results_without_anything_leave_room_for_another(provider: FakeProvider):
    with anyio.fail_after(20):
        async with SandboxService(provider, Settings(runs={"kept_bytes": 7000})) as service:
            box = (await service.create(ME)).sandbox_id
            first = await started(service, box, "1")
            await read(service, first)
            await read(service, await started(service, box, "1"))
            assert (await read(service, first)).page.text == "ran\n"


async def test_a_result_names_as_many_artifacts_as_fit_into_a_page(provider: FakeProvider):
    provider.plans["1"] = [*(Artifact(f"/tmp/outputs/{number}{BIG}", 1) for number in range(100)), finished()]
    async with SandboxService(provider, Settings()) as service:
        result = await service.run(CodeRun(ME, "1"))
    assert 1 < len(result.artifacts) < 10
    assert not result.artifacts_complete
    assert len(result.model_dump_json()) < 40_000


async def test_displays_have_a_size_in_all(provider: FakeProvider):
    provider.plans["1"] = [*([Display({}, (BIG,) * 20)] * 100), finished()]
    async with SandboxService(provider, Settings()) as service:
        result = await service.run(CodeRun(ME, "1"))
    assert 0 < len(result.displays) < 10
    assert len(result.displays) + result.displays_dropped == 100


async def test_output_missing_from_a_result_can_be_read_from_the_run(provider: FakeProvider):
    provider.plans["flood"] = [Output("stderr", "!"), Output("stdout", "a" * 300 + "b" * 300), finished()]
    settings = Settings(output={"head_bytes": 256, "tail_bytes": 256})
    with anyio.fail_after(20):
        async with SandboxService(provider, settings) as service:
            box = (await service.create(ME)).sandbox_id
            result = await service.run(CodeRun(ME, "flood", box))
            offset = result.stdout.log_offset
            assert offset is not None
            view = await service.read_output(ME, box, result.run_id, offset=offset, wait_s=0)
            assert view.page.text == "a" * 44 + "b" * 300


async def test_the_limit_on_runs_per_owner_is_enforced_and_named(service: SandboxService, provider: FakeProvider):
    for _ in range(2):
        await started(service, None)
    with pytest.raises(LimitReached, match=r"limits\.owner_runs = 2"):
        await service.run(CodeRun(ME, "1"))
    assert len(provider.agents) == 2  # no machine was taken for it
    assert (await service.run(CodeRun("other", "1"))).status == "ok"
    await anyio.wait_all_tasks_blocked()
    assert provider.alive == 2


async def test_runs_in_a_sandbox_of_another_owner_do_not_exist(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    view = await started(service, box)
    with pytest.raises(SandboxNotFound):
        await service.read_output("other", box, view.run_id, offset=0, wait_s=0)
    with pytest.raises(SandboxNotFound):
        await service.stop_run("other", box, view.run_id)


async def test_a_reader_gets_an_error_when_the_sandbox_ends_during_the_run(
    service: SandboxService, provider: FakeProvider
):
    box = (await service.create(ME)).sandbox_id
    view = await started(service, box)

    async def wait() -> None:
        with pytest.raises(SandboxClosed):
            await read(service, view, wait_s=3600)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await service.close(ME, box)
    assert provider.alive == 0


async def test_the_output_of_a_run_can_be_read_after_its_machine_was_lost(
    service: SandboxService, provider: FakeProvider
):
    Talk(provider, "last words")
    view = await started(service, None, "talk")
    views: list[RunProgress] = []

    async def wait() -> None:
        views.append(await read(service, view, wait_s=3600))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        provider.agent.machine.ended.set()
    await anyio.wait_all_tasks_blocked()
    assert provider.alive == 0
    views.append(await read(service, view))
    for seen in views:
        assert (seen.page.text, seen.result) == ("last words\n", None)
        assert seen.error is not None
        assert seen.error.code == "machine_lost"
    with pytest.raises(MachineLost) as lost:
        await service.run(CodeRun(ME, "1", view.sandbox_id))
    assert (lost.value.sandbox_id, lost.value.run_id) == (view.sandbox_id, "run-1")
    with pytest.raises(SandboxNotFound):
        await service.read_output("other", view.sandbox_id, "run-1", offset=0, wait_s=0)


async def test_a_call_whose_machine_is_lost_gets_the_run_id_to_read_its_output(
    service: SandboxService, provider: FakeProvider
):
    provider.plans["die late"] = [Output("stdout", "so far\n"), anyio.Event()]
    errors: list[RunLost] = []

    async def run() -> None:
        with pytest.raises(RunLost) as error:
            await service.run(CodeRun(ME, "die late"))
        errors.append(error.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        provider.agent.machine.ended.set()
    (error,) = errors
    assert error.run_id is not None
    view = await service.read_output(ME, error.sandbox_id, error.run_id, offset=0, wait_s=0)
    assert view.page.text == "so far\n"


async def test_a_one_off_run_whose_machine_was_already_dead_gets_another_one():
    class FirstIsDead(FakeProvider):
        @asynccontextmanager
        async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
            async with super().acquire(request) as lease:
                if len(self.agents) <= self.dead:
                    self.agent.run = self._gone  # type: ignore[assignment]
                yield lease

        @asynccontextmanager
        async def _gone(self, _request: object) -> AsyncIterator[None]:
            self.agents[-1].machine.ended.set()
            raise AgentGone("the machine's agent closed the stream")
            yield

        dead = 1

    provider = FirstIsDead()
    with anyio.fail_after(20):
        async with SandboxService(provider, Settings()) as service:
            assert (await service.run(CodeRun(ME, "1"))).status == "ok"
            assert len(provider.agents) == 2
            provider.dead = 99
            with pytest.raises(RunLost, match="no result"):
                await service.run(CodeRun(ME, "1"))
            assert len(provider.agents) == 4


async def test_a_one_off_run_that_had_started_is_never_retried(service: SandboxService, provider: FakeProvider):
    with pytest.raises(RunLost):
        await service.run(CodeRun(ME, "die"))
    assert len(provider.agents) == 1


async def test_closing_a_sandbox_frees_the_logs_of_its_runs(service: SandboxService, provider: FakeProvider):
    box = (await service.create(ME)).sandbox_id
    await read(service, await started(service, box, "1"))
    log = weakref.ref(service.alive()[0].runs.find(box, "run-1").log)
    await service.close(ME, box)
    provider.agents.clear()
    gc.collect()
    assert log() is None


def test_the_newest_lost_runs_and_endings_are_kept():
    endings = Endings()
    for number in range(MAX_ENDINGS + 1):
        endings.add(Ending(f"sb-{number}", ME, End.LOST, "gone", lost_runs=(LostRun("run-1", OutputLog(10), 1.0),)))
    found = [endings.find(ME, f"sb-{number}") for number in range(MAX_ENDINGS + 1)]
    kept = [ending for ending in found if ending is not None]
    assert (found[0], len(kept)) == (None, MAX_ENDINGS)
    assert [ending.sandbox_id for ending in kept if ending.lost_runs] == [
        f"sb-{number}" for number in range(MAX_ENDINGS + 1 - MAX_LOST_RUNS, MAX_ENDINGS + 1)
    ]


def test_lost_runs_are_counted_and_not_the_sandboxes_that_had_them():
    endings = Endings()
    runs = tuple(LostRun(f"run-{number}", OutputLog(10), 1.0) for number in range(MAX_LOST_RUNS - 1))
    for name in ("sb-old", "sb-new"):
        endings.add(Ending(name, ME, End.LOST, "gone", lost_runs=runs))
    kept = [endings.find(ME, name) for name in ("sb-old", "sb-new")]
    assert [len(ending.lost_runs) for ending in kept if ending] == [1, MAX_LOST_RUNS - 1]


async def test_a_failing_observer_harms_no_sandbox(provider: FakeProvider, caplog: pytest.LogCaptureFixture):
    class Broken(Observer):
        def machine_ready(self, box: object, machine: object, waited_s: float) -> None:
            raise RuntimeError("no disk")

        def run_ended(self, box: object, outcome: str) -> None:
            raise RuntimeError("no disk")

    with anyio.fail_after(20):
        async with SandboxService(provider, Settings(), Broken()) as service:
            box = (await service.create(ME)).sandbox_id
            for _ in range(2):
                assert (await service.run(CodeRun(ME, "1", box))).status == "ok"
    assert "an observer of sandbox" in caplog.text


async def test_progress_reports_the_newest_line(
    service: SandboxService, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mcp_sandbox.sandboxes.run_calls.PROGRESS_EVERY_S", 0)
    talk = Talk(provider, "one", "two", "three")
    lines: list[str] = []

    async def report(elapsed_s: float, line: str) -> None:
        lines.append(line)
        talk.gates[len(lines) - 1].set()

    result = await service.run_for_client(CodeRun(ME, "talk"), report=report)
    assert isinstance(result, RunView)
    assert lines == ["one", "two", "three"]


async def test_a_background_run_keeps_its_sandbox_from_being_idle(provider: FakeProvider):
    with anyio.fail_after(20):
        async with SandboxService(provider, Settings(lifetime={"idle_s": 0.05})) as service:
            box = (await service.create(ME)).sandbox_id
            await service.run_for_client(CodeRun(ME, "forever", box, timeout_s=0.2), background=True)
            await provider.released.wait()
            assert provider.agent.stops == 1  # its own deadline came first
