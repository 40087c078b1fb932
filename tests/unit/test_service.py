"""The service with fake machines: sandboxes of many owners, their limits, runs and files."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from guest.client.messages import CodeError, Event, FileChunk, Output, OutputTotals, RunCode
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import (
    BadRequest,
    FileError,
    FileNotFound,
    FileTooLarge,
    LimitReached,
    MachineLost,
    SandboxClosed,
    SandboxExpired,
    SandboxNotFound,
    StartFailed,
    TemplateNotBuilt,
    UnknownTemplate,
)
from mcp_sandbox.machines.provider import Lease, LeasedMachine, MachineRequest
from mcp_sandbox.runs.requests import CodeRun, RunRequest
from mcp_sandbox.sandboxes import sandbox
from mcp_sandbox.sandboxes.lifecycle import End, State
from mcp_sandbox.sandboxes.sandbox import Observer, Sandbox
from mcp_sandbox.sandboxes.service import SandboxService
from templates.catalogue import Catalogue
from tests.unit.fakes import TEMPLATE, FakeAgent, FakeProvider, FakeRun, finished
from tests.waiting import HANG_S
from vmm.types import CpuPriority

ME = "me"
HOST_MB = Catalogue().load(TEMPLATE).machine.host_mb  # memory and overhead of one sandbox


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def service(provider: FakeProvider) -> AsyncIterator[SandboxService]:
    with anyio.fail_after(20):
        async with SandboxService(provider, Settings(limits={"sandboxes": 2})) as service:
            yield service


async def test_a_sandbox_is_created_used_and_closed(service: SandboxService, provider: FakeProvider):
    info = await service.create(ME)
    assert info.template == TEMPLATE
    assert [box.sandbox_id for box in service.sandboxes(ME)] == [info.sandbox_id]
    result = await service.run(CodeRun(ME, "1", info.sandbox_id))
    assert (result.status, result.stdout.head, result.sandbox_id) == ("ok", "ran\n", info.sandbox_id)
    assert await service.close(ME, info.sandbox_id) is True
    assert provider.alive == 0
    assert service.sandboxes(ME) == []


class Notes(Observer):
    """Records what it observes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def machine_ready(self, box: Sandbox, machine: LeasedMachine, waited_s: float) -> None:
        self.seen.append((box.owner, "got", machine.id))

    def run_ended(self, box: Sandbox, outcome: str) -> None:
        self.seen.append((box.owner, "ran", outcome))


async def test_the_observer_is_notified_of_machines_and_ended_runs(provider: FakeProvider):
    notes = Notes()
    async with SandboxService(provider, Settings(), notes) as service:
        box = (await service.create(ME)).sandbox_id
        await service.run(CodeRun(ME, "1", box))
        machine = provider.agent.machine.id
    assert notes.seen == [(ME, "got", machine), (ME, "ran", "ok")]


async def test_closing_twice_is_no_error_and_a_closed_sandbox_cannot_be_used(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    await service.close(ME, box)
    assert await service.close(ME, box) is False
    with pytest.raises(SandboxClosed, match="was closed;"):
        await service.run(CodeRun(ME, "1", box))


async def test_an_owner_learns_that_an_operator_closed_the_sandbox(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    await service.alive()[0].close("an operator closed it")
    with pytest.raises(SandboxClosed, match=r"was closed \(an operator closed it\);"):
        await service.run(CodeRun(ME, "1", box))
    assert await service.close(ME, box) is False


async def test_a_sandbox_of_another_owner_looks_like_one_that_never_existed(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    with pytest.raises(SandboxNotFound) as other:
        await service.run(CodeRun("other", "1", box))
    with pytest.raises(SandboxNotFound) as unknown:
        await service.run(CodeRun("other", "1", "sb-0"))
    assert str(other.value).replace(box, "sb-0") == str(unknown.value)
    assert type(other.value) is type(unknown.value)
    assert service.sandboxes("other") == []
    with pytest.raises(SandboxNotFound):
        await service.close("other", box)
    await service.close(ME, box)
    with pytest.raises(SandboxNotFound) as dead:
        await service.close("other", box)
    assert type(dead.value) is SandboxNotFound


async def test_a_one_off_run_leaves_no_sandbox(service: SandboxService, provider: FakeProvider):
    result = await service.run(CodeRun(ME, "1"))
    assert result.sandbox_id is None
    assert result.timings.restore_ms == pytest.approx(100)
    assert result.timings.queue_ms >= 1
    assert service.sandboxes(ME) == []
    await anyio.wait_all_tasks_blocked()
    assert provider.alive == 0


async def test_leaving_the_service_ends_all_machines(provider: FakeProvider):
    with anyio.fail_after(5):
        async with SandboxService(provider, Settings()) as service:
            await service.create(ME)
            await service.create(ME)
            assert provider.alive == 2
        assert provider.alive == 0


async def test_the_error_names_the_limit_on_sandboxes(service: SandboxService):
    await service.create(ME)
    await service.create(ME)
    with pytest.raises(LimitReached, match=r"limits\.sandboxes = 2"):
        await service.create(ME)


async def test_a_waiting_creation_gets_the_place_of_a_closed_sandbox(service: SandboxService):
    taken = [(await service.create(ME)).sandbox_id for _ in range(2)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.create, "other")
        await anyio.wait_all_tasks_blocked()
        assert service.sandboxes("other") == []
        await service.close(ME, taken[0])
    assert len(service.sandboxes("other")) == 1


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (Settings(limits={"owner_sandboxes": 1}), "limits.owner_sandboxes = 1"),
        (Settings(limits={"owner_memory_mb": HOST_MB}), f"limits.owner_memory_mb = {HOST_MB}"),
        (Settings(limits={"memory_mb": HOST_MB}), f"limits.memory_mb = {HOST_MB}"),
    ],
)
async def test_limits_per_owner_and_on_memory_are_enforced(provider: FakeProvider, settings: Settings, limit: str):
    with anyio.fail_after(5):
        async with SandboxService(provider, settings) as service:
            await service.create(ME)
            with pytest.raises(LimitReached, match=limit):
                await service.create(ME)
            if settings.limits.memory_mb is None:
                await service.create("other")


@pytest.mark.parametrize("setting", ["memory_mb", "owner_memory_mb"])
async def test_limits_on_memory_count_the_overhead_of_a_machine(provider: FakeProvider, setting: str):
    async with SandboxService(provider, Settings(limits={setting: HOST_MB - 1})) as service:
        with pytest.raises(LimitReached, match=f"limits.{setting} = {HOST_MB - 1}"):
            await service.create(ME)


def seen(agent: FakeAgent) -> CpuPriority | None:
    """Return the priority of the agent's machine."""
    return agent.machine.priority


async def test_a_machine_gets_little_cpu_while_no_call_uses_it(
    service: SandboxService, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sandbox, "LULL_S", 0)
    sandbox_id = (await service.create(ME)).sandbox_id
    [agent] = provider.agents
    assert seen(agent) is CpuPriority.UNUSED
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run, CodeRun(ME, "forever", sandbox_id))
        await agent.running.wait()
        await service.write(ME, sandbox_id, "/workspace/a", b"a")  # the other use is not over
        assert seen(agent) is CpuPriority.INTERACTIVE
        tasks.cancel_scope.cancel()
    await anyio.wait_all_tasks_blocked()
    assert seen(agent) is CpuPriority.UNUSED


async def test_a_machine_keeps_its_priority_between_runs_that_follow_each_other(
    service: SandboxService, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sandbox, "LULL_S", 1000)
    sandbox_id = (await service.create(ME)).sandbox_id
    for _ in range(2):
        await service.run(CodeRun(ME, "1", sandbox_id))
        assert seen(provider.agent) is CpuPriority.INTERACTIVE


async def test_a_long_run_yields_to_other_sandboxes(
    service: SandboxService, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sandbox, "LONG_USE_S", 0)
    sandbox_id = (await service.create(ME)).sandbox_id
    [agent] = provider.agents
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run, CodeRun(ME, "forever", sandbox_id))
        await agent.running.wait()
        await anyio.wait_all_tasks_blocked()
        assert seen(agent) is CpuPriority.BATCH
        tasks.cancel_scope.cancel()


async def test_an_unknown_template_is_refused_before_waiting_for_a_place(
    service: SandboxService, provider: FakeProvider
):
    with pytest.raises(UnknownTemplate, match=TEMPLATE):
        await service.create(ME, "nonsense")
    assert (provider.agents, service.admission.holders) == ([], [])


async def test_a_requested_lifespan_is_enforced(service: SandboxService, provider: FakeProvider):
    info = await service.create(ME, ttl_s=100, idle_s=50)
    assert 0 < info.expires_in_s <= 50 < info.ends_in_s <= 100
    with pytest.raises(BadRequest, match="ttl_s"):
        await service.create(ME, ttl_s=1e9)
    short = await service.create(ME, idle_s=0.01)
    await provider.released.wait()
    with pytest.raises(SandboxExpired, match=r"idle for 0.01 s"):
        await service.run(CodeRun(ME, "1", short.sandbox_id))


async def test_the_state_shows_whether_a_run_is_active(service: SandboxService, provider: FakeProvider):
    info = await service.create(ME)
    assert info.state == State.READY
    await service.run_for_client(CodeRun(ME, "forever", info.sandbox_id), background=True)
    assert [box.state for box in service.sandboxes(ME)] == [State.RUNNING]
    await service.stop_run(ME, info.sandbox_id, "run-1")
    assert [box.state for box in service.sandboxes(ME)] == [State.READY]


class SlowlyReleased(FakeProvider):
    """Tears its machines down slowly, and counts how many existed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.go = anyio.Event()
        self.most = 0

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        async with super().acquire(request) as lease:
            self.most = max(self.most, self.alive)
            try:
                yield lease
            finally:
                with anyio.CancelScope(shield=True):
                    await self.go.wait()


async def test_a_machine_counts_until_it_is_torn_down():
    provider = SlowlyReleased()
    with anyio.fail_after(5):
        async with (
            SandboxService(provider, Settings(limits={"sandboxes": 2})) as service,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(4):
                tasks.start_soon(service.run, CodeRun(ME, "1"))
                await anyio.wait_all_tasks_blocked()
            provider.go.set()
    assert (provider.most, len(provider.agents)) == (2, 4)


async def test_the_first_of_several_errors_is_raised_and_all_are_logged(
    provider: FakeProvider, caplog: pytest.LogCaptureFixture
):
    class Broken(FakeProvider):
        @asynccontextmanager
        async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
            raise ExceptionGroup("both", [TemplateNotBuilt(request.template), OSError("and the disk is on fire")])
            yield

    async with SandboxService(Broken(), Settings()) as service:
        with pytest.raises(TemplateNotBuilt):
            await service.create(ME)
    assert "and the disk is on fire" in caplog.text


async def test_the_error_names_a_template_that_is_not_built(service: SandboxService, provider: FakeProvider):
    provider.error = TemplateNotBuilt(TEMPLATE)
    with pytest.raises(TemplateNotBuilt, match=TEMPLATE):
        await service.create(ME)
    provider.error = None
    await service.create(ME)  # the failure holds no place


async def test_a_cancelled_creation_leaves_no_machine(service: SandboxService, provider: FakeProvider):
    provider.hold = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.create, ME)
        await provider.waiting.wait()
        tasks.cancel_scope.cancel()
    provider.hold.set()
    await anyio.wait_all_tasks_blocked()
    assert (provider.alive, provider.agents) == (0, [])


async def test_a_machine_that_arrives_as_its_creation_is_cancelled_is_released(
    service: SandboxService, provider: FakeProvider, caplog: pytest.LogCaptureFixture
):
    provider.hold = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.create, ME)
        await provider.waiting.wait()
        provider.hold.set()
        service.alive()[0].end(End.CLOSED)  # in the same iteration of the event loop
        tasks.cancel_scope.cancel()
    await anyio.wait_all_tasks_blocked()
    assert (provider.alive, service.admission.holders, caplog.records) == (0, [], [])


async def test_a_run_past_its_timeout_is_interrupted_and_keeps_its_state(
    service: SandboxService, provider: FakeProvider
):
    box = (await service.create(ME)).sandbox_id
    result = await service.run(CodeRun(ME, "forever", box, timeout_s=0.01))
    assert (result.status, result.state, result.timed_out_after_s) == ("interrupted", "kept", 0.01)
    assert result.stdout.head == "partial"
    assert provider.agent.stops == 1


class LateRun(FakeRun):
    """Ends at the moment it is stopped."""

    def __init__(self, agent: FakeAgent, request: RunCode) -> None:
        super().__init__(agent, request)
        self._stubborn = True

    async def __anext__(self) -> Event:
        if self._stubborn:
            await self._until_stopped()
            self._stubborn = False
        return await super().__anext__()


async def test_a_run_that_ends_at_its_deadline_is_not_reported_as_stopped(
    service: SandboxService, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.unit.fakes.FakeRun", LateRun)
    result = await service.run(CodeRun(ME, "1", timeout_s=0.01))
    assert (result.status, result.timed_out_after_s) == ("ok", None)


async def test_a_run_that_ignores_the_interrupt_loses_its_state_and_says_so(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    result = await service.run(CodeRun(ME, "stubborn", box, timeout_s=0.01))
    assert (result.status, result.state) == ("killed", "lost")


async def test_a_cancelled_run_is_stopped_and_its_sandbox_stays(service: SandboxService, provider: FakeProvider):
    box = (await service.create(ME)).sandbox_id
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run, CodeRun(ME, "forever", box))
        await provider.agent.running.wait()
        tasks.cancel_scope.cancel()
    assert provider.agent.stops == 1
    assert (await service.run(CodeRun(ME, "1", box))).status == "ok"


async def test_a_cancelled_one_off_run_frees_its_machine(service: SandboxService, provider: FakeProvider):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run, CodeRun(ME, "forever"))
        while not provider.agents:
            await anyio.wait_all_tasks_blocked()
        await provider.agent.running.wait()
        tasks.cancel_scope.cancel()
    await anyio.wait_all_tasks_blocked()
    assert provider.alive == 0


async def test_closing_during_a_run_ends_the_run(service: SandboxService, provider: FakeProvider):
    box = (await service.create(ME)).sandbox_id

    async def run() -> None:
        with pytest.raises(SandboxClosed):
            await service.run(CodeRun(ME, "forever", box))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await provider.agent.running.wait()
        assert await service.close(ME, box) is True
    assert provider.alive == 0


async def test_a_machine_lost_during_a_run_ends_the_sandbox_with_the_reason(
    service: SandboxService, provider: FakeProvider
):
    box = (await service.create(ME)).sandbox_id
    with pytest.raises(MachineLost, match="signal 9: out of memory"):
        await service.run(CodeRun(ME, "die", box))
    with pytest.raises(MachineLost, match="files are gone"):
        await service.read(ME, box, "x", limit=1)
    await anyio.wait_all_tasks_blocked()
    assert (provider.alive, service.sandboxes(ME)) == (0, [])


async def test_a_machine_lost_while_idle_is_reported_at_the_next_use(service: SandboxService, provider: FakeProvider):
    box = (await service.create(ME)).sandbox_id
    provider.agent.machine.ended.set()
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(MachineLost, match="out of memory"):
        await service.run(CodeRun(ME, "1", box))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [(Settings(lifetime={"idle_s": 0.01}), "idle"), (Settings(lifetime={"max_age_s": 0.01}), "maximum age")],
)
async def test_a_sandbox_ends_when_its_time_is_up(provider: FakeProvider, settings: Settings, reason: str):
    async def use_too_late(service: SandboxService) -> None:
        box = (await service.create(ME)).sandbox_id  # on a busy host it may end before this returns
        await provider.released.wait()
        await service.run(CodeRun(ME, "1", box))

    with anyio.fail_after(HANG_S):
        async with SandboxService(provider, settings) as service:
            with pytest.raises(SandboxExpired, match=reason):
                await use_too_late(service)


async def test_a_sandbox_in_use_is_not_idle(provider: FakeProvider):
    with anyio.fail_after(5):
        async with SandboxService(provider, Settings(lifetime={"idle_s": 0.05})) as service:
            box = (await service.create(ME)).sandbox_id
            result = await service.run(CodeRun(ME, "forever", box, timeout_s=0.2))
            assert result.status == "interrupted"
            await provider.released.wait()


async def test_runs_in_one_sandbox_execute_one_after_another(service: SandboxService, provider: FakeProvider):
    box = (await service.create(ME)).sandbox_id
    results = []

    async def run(code: str, timeout_s: float) -> None:
        results.append(await service.run(CodeRun(ME, code, box, timeout_s=timeout_s)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "forever", 0.05)
        await provider.agent.running.wait()
        tasks.start_soon(run, "1", 1.0)
    assert [result.status for result in results] == ["interrupted", "ok"]
    assert results[1].timings.queue_ms > 0


async def test_long_output_keeps_both_ends(provider: FakeProvider):
    output = OutputTotals(1300, 0, stdout_spill="/tmp/outputs/stdout.txt")
    tail = Output("stdout", "z" * 256, gap_bytes=788)
    provider.plans["flood"] = [Output("stdout", "a" * 256), tail, finished(output=output)]
    settings = Settings(output={"head_bytes": 256, "tail_bytes": 256})
    async with SandboxService(provider, settings) as service:
        box = (await service.create(ME)).sandbox_id
        out = (await service.run(CodeRun(ME, "flood", box))).stdout
    assert (out.head, out.tail, out.omitted_bytes) == ("a" * 256, "z" * 256, 788)
    assert out.spill == "/tmp/outputs/stdout.txt"


async def test_the_host_truncates_output_too(provider: FakeProvider):
    provider.plans["flood"] = [*(Output("stdout", "é" * 100) for _ in range(50)), finished()]
    async with SandboxService(provider, Settings(output={"head_bytes": 301, "tail_bytes": 301})) as service:
        box = (await service.create(ME)).sandbox_id
        out = (await service.run(CodeRun(ME, "flood", box))).stdout
    assert out.head == out.tail == "é" * 150
    assert out.omitted_bytes == 10_000 - 602


async def test_a_result_contains_new_images_up_to_the_limits(provider: FakeProvider):
    async with SandboxService(provider, Settings(output={"images": 2})) as service:
        box = (await service.create(ME)).sandbox_id
        provider.agent.draws("draw", "a.png", "b.png", "c.png")
        result = await service.run(CodeRun(ME, "draw", box))
        assert len({picture.data for picture in result.images}) == 2  # each once
        assert len(result.images) == 2
        assert len(result.artifacts) == 3
        provider.agent.draws("fake", "not.png", data=b"not a picture")
        assert (await service.run(CodeRun(ME, "fake", box))).images == ()


async def test_code_that_fails_is_a_result(service: SandboxService, provider: FakeProvider):
    error = CodeError("ValueError", "no", "Traceback …\nValueError: no")
    provider.plans["raise"] = [finished("error", error=error)]
    result = await service.run(CodeRun(ME, "raise"))
    assert (result.status, result.error) == ("error", error)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (CodeRun(ME, ""), "empty"),
        (CodeRun(ME, " \n"), "empty"),
        (CodeRun(ME, "a\0b"), "null byte"),
        (CodeRun(ME, "x" * 2000), "1,024 bytes"),
        (CodeRun(ME, "1", timeout_s=0), "The timeout must be greater than 0"),
        (CodeRun(ME, "1", timeout_s=1e9), "at most 600"),
        (CodeRun(ME, "1", "sb-1", "python-data-analysis"), "not both"),
    ],
)
async def test_a_bad_request_starts_no_machine(provider: FakeProvider, request_: RunRequest, words: str):
    async with SandboxService(provider, Settings(runs={"max_code_bytes": 1024})) as service:
        with pytest.raises(BadRequest, match=words):
            await service.run(request_)
    assert provider.agents == []


async def test_files_are_written_read_and_listed(service: SandboxService):
    box = (await service.create(ME)).sandbox_id
    info = await service.write(ME, box, "data/a.txt", b"hello")
    assert (info.path, info.size) == ("/workspace/data/a.txt", 5)
    assert (await service.read(ME, box, "/workspace/data/a.txt", offset=1, limit=3)).data == b"ell"
    assert await service.read_all(ME, box, "data/a.txt") == b"hello"
    listing = await service.list_files(ME, box, ".", recursive=True)
    assert [entry.path for entry in listing.entries] == ["/workspace/data/a.txt"]


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
async def test_an_impossible_path_is_refused(service: SandboxService, path: str):
    box = (await service.create(ME)).sandbox_id
    with pytest.raises(BadRequest, match="path"):
        await service.read(ME, box, path, limit=1)


async def test_missing_and_oversized_files_have_their_own_errors(provider: FakeProvider):
    async with SandboxService(provider, Settings(files={"max_read_bytes": 1024, "max_write_bytes": 1024})) as service:
        box = (await service.create(ME)).sandbox_id
        with pytest.raises(FileNotFound, match="does not exist"):
            await service.read(ME, box, "nothing", limit=1)
        provider.agent.files["/workspace/big"] = bytes(2000)
        with pytest.raises(FileError, match="2,000 bytes"):
            await service.read_all(ME, box, "big")
        with pytest.raises(FileTooLarge, match="at most 1,024"):
            await service.write(ME, box, "big", bytes(1025))


@pytest.fixture
def _short_file_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sandboxes.file_access", "sandboxes.execution"):
        monkeypatch.setattr(f"mcp_sandbox.{module}.FILE_TIMEOUT_S", 0.02)


async def one_byte_at_a_time(path: str, *, offset: int = 0, limit: int) -> FileChunk:
    await anyio.lowlevel.checkpoint()
    return FileChunk(b"x", 1000, eof=False)


async def no_answer(*_: object, **__: object) -> None:
    await anyio.sleep_forever()


@pytest.mark.usefixtures("_short_file_timeout")
async def test_a_file_operation_that_times_out_leaves_the_sandbox_usable(
    service: SandboxService, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    box = (await service.create(ME)).sandbox_id
    for name in ("read", "write", "list"):
        monkeypatch.setattr(provider.agent, name, no_answer)
    for call in (
        lambda: service.read(ME, box, "a", limit=1),
        lambda: service.read_all(ME, box, "a"),
        lambda: service.write(ME, box, "a", b""),
        lambda: service.list_files(ME, box, ".", recursive=True),
        lambda: service.artifacts(ME, box),
    ):
        with pytest.raises(FileError, match="did not answer"):
            await call()
    assert (await service.run(CodeRun(ME, "1", box))).status == "ok"


@pytest.mark.usefixtures("_short_file_timeout")
async def test_an_agent_that_sends_a_file_endlessly_times_out(provider: FakeProvider):
    with anyio.fail_after(5):
        async with SandboxService(
            provider, Settings(files={"max_read_bytes": 1 << 30}, output={"image_bytes": 1 << 30})
        ) as service:
            box = (await service.create(ME)).sandbox_id
            provider.agent.draws("draw", "a.png", "b.png")
            provider.agent.read = one_byte_at_a_time  # type: ignore[method-assign]
            with pytest.raises(FileError, match="did not answer"):
                await service.read_all(ME, box, "endless")
            assert (await service.run(CodeRun(ME, "draw", box))).images == ()


async def test_an_unexpected_provider_error_becomes_a_start_failure(provider: FakeProvider):
    provider.error = OSError("the disk is on fire")  # type: ignore[assignment]
    async with SandboxService(provider, Settings()) as service:
        with pytest.raises(StartFailed, match="on fire"):
            await service.run(CodeRun(ME, "1"))
