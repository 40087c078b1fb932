"""Forking, pausing and resuming with fake machines: limits, errors and cleanup."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from guest.client.streams import ServeStream
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import (
    BadRequest,
    CannotFreeze,
    LimitReached,
    MachineLost,
    SandboxBusy,
    SandboxChanging,
    SandboxError,
    SandboxExpired,
    SandboxNotFound,
    SandboxPaused,
    StartFailed,
    StateLost,
)
from mcp_sandbox.machines.provider import Frozen, Lease
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.lifecycle import Lifespan, State
from mcp_sandbox.sandboxes.service import SandboxService
from tests.unit.fakes import FakeProvider

ME = "me"


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@asynccontextmanager
async def served(provider: FakeProvider, **settings: Any) -> AsyncIterator[SandboxService]:
    with anyio.fail_after(10):
        async with SandboxService(provider, Settings(**settings)) as service:
            yield service
    assert (provider.alive, provider.frozen) == (0, 0)


@pytest.fixture
async def service(provider: FakeProvider) -> AsyncIterator[SandboxService]:
    async with served(provider) as service:
        yield service


async def with_file(service: SandboxService) -> str:
    box = (await service.create(ME, ttl_s=1000, idle_s=500)).sandbox_id
    await service.write(ME, box, "f", b"mine")
    return box


def states(service: SandboxService) -> list[str]:
    return [box.state for box in service.sandboxes(ME)]


# -- forks -------------------------------------------------------------------------------------------------


async def test_copies_are_ordinary_sandboxes(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    copies = await service.fork(ME, box, 3)
    assert len({box, *(copy.sandbox_id for copy in copies)}) == 4
    assert {info.sandbox_id for info in service.sandboxes(ME)} == {box, *(copy.sandbox_id for copy in copies)}
    assert provider.copies == [True] * 3
    assert provider.frozen == 0
    for copy in copies:
        assert 900 < copy.ends_in_s <= 1000
        assert await service.read_all(ME, copy.sandbox_id, "f") == b"mine"
        await service.close(ME, copy.sandbox_id)
    assert await service.read_all(ME, box, "f") == b"mine"


@pytest.mark.parametrize("count", [0, 9])
async def test_the_number_of_copies_is_limited(service: SandboxService, count: int):
    box = await with_file(service)
    with pytest.raises(BadRequest, match="at most 8"):
        await service.fork(ME, box, count)


async def test_a_fork_makes_all_copies_or_none(provider: FakeProvider):
    async with served(provider, limits={"sandboxes": 3}) as service:
        box = await with_file(service)
        with pytest.raises(LimitReached, match=r"limits\.sandboxes = 3"):
            await service.fork(ME, box, 3)
        assert (len(service.admission.holders), provider.copies) == (1, [])
        assert len(await service.fork(ME, box, 2)) == 2


async def test_a_fork_checks_the_sandbox_before_the_limits(provider: FakeProvider):
    async with served(provider, limits={"sandboxes": 1}) as service:
        box = await with_file(service)
        await service.run_for_client(CodeRun(ME, "forever", box), background=True)
        with pytest.raises(SandboxBusy, match="run-1"):
            await service.fork(ME, box, 1)
        await service.stop_run(ME, box, "run-1")
        await service.pause(ME, box)
        await service.create(ME)
        with pytest.raises(SandboxPaused):
            await service.fork(ME, box, 1)


async def test_two_forks_at_the_limit_do_not_deadlock(provider: FakeProvider):
    async with served(provider, limits={"sandboxes": 5, "queue_timeout_s": 5}) as service:
        boxes = {owner: (await service.create(owner)).sandbox_id for owner in ("me", "you")}
        passing = (await service.create("them")).sandbox_id
        made: list[int] = []

        async def fork(owner: str) -> None:
            copies = await service.fork(owner, boxes[owner], 3)
            made.append(len(copies))
            for copy in copies:
                await service.close(owner, copy.sandbox_id)

        async with anyio.create_task_group() as tasks:
            for owner in boxes:
                tasks.start_soon(fork, owner)
            await anyio.wait_all_tasks_blocked()
            assert (len(service.admission.holders), service.admission.waiting) == (3, 6)
            await service.close("them", passing)
        assert made == [3, 3]


async def test_one_owner_cannot_use_up_the_limit_on_paused_sandboxes(provider: FakeProvider):
    async with served(provider, limits={"paused": 2, "owner_paused": 1}) as service:
        first, second = await with_file(service), await with_file(service)
        await service.pause(ME, first)
        with pytest.raises(LimitReached, match=r"limits\.owner_paused = 1"):
            await service.pause(ME, second)
        for owner in ("you", "them"):
            other = (await service.create(owner)).sandbox_id
            if owner == "you":
                await service.pause(owner, other)
                continue
            with pytest.raises(LimitReached, match=r"limits\.paused = 2"):
                await service.pause(owner, other)


class FailsOnThirdThaw(FakeProvider):
    @asynccontextmanager
    async def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: ServeStream | None = None
    ) -> AsyncIterator[Lease]:
        async with super().thaw(frozen, copy=copy, serve_stream=serve_stream) as lease:
            if len(self.copies) == 3:
                raise StartFailed("no more memory")
            yield lease


async def test_if_one_copy_fails_all_are_removed():
    provider = FailsOnThirdThaw()
    async with served(provider) as service:
        box = await with_file(service)
        with pytest.raises(SandboxError, match="no more memory"):
            await service.fork(ME, box, 4)
        assert ([info.sandbox_id for info in service.sandboxes(ME)], provider.alive) == ([box], 1)
        assert len(service.admission.holders) == 1
        assert await service.read_all(ME, box, "f") == b"mine"


class LosesCopyAtTheEnd(FakeProvider):
    @asynccontextmanager
    async def freeze(self, lease: Lease) -> AsyncIterator[Frozen]:
        async with super().freeze(lease) as frozen:
            yield frozen
            if self.copies:
                self.agent.machine.ended.set()
                await anyio.wait_all_tasks_blocked()


async def test_if_a_copy_dies_while_the_state_is_removed_all_are_removed():
    provider = LosesCopyAtTheEnd()
    async with served(provider) as service:
        box = await with_file(service)
        with pytest.raises(MachineLost, match="out of memory"):
            await service.fork(ME, box, 3)
        assert ([info.sandbox_id for info in service.sandboxes(ME)], provider.alive) == ([box], 1)


async def test_another_owners_sandbox_cannot_be_forked_paused_or_resumed(service: SandboxService):
    box = await with_file(service)
    for call in (service.fork("you", box, 1), service.pause("you", box), service.resume("you", box)):
        with pytest.raises(SandboxNotFound):
            await call


@pytest.mark.parametrize("background", [True, False])
async def test_forks_and_pauses_are_refused_while_a_run_is_active(
    service: SandboxService, provider: FakeProvider, background: bool
):
    box = await with_file(service)
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await service.run_for_client(CodeRun(ME, "forever", box), background=background)

        tasks.start_soon(run)
        await provider.agent.running.wait()
        for call in (service.fork(ME, box, 1), service.pause(ME, box)):
            with pytest.raises(SandboxBusy, match=r"run-1 has been running"):
                await call
        await service.stop_run(ME, box, "run-1")
    assert (await service.pause(ME, box)).state == State.PAUSED


async def test_a_run_is_refused_while_its_sandbox_is_being_forked(provider: FakeProvider):
    async with served(provider) as service:
        box = await with_file(service)
        freezing, go_on = anyio.Event(), anyio.Event()
        freeze = provider.freeze

        @asynccontextmanager
        async def slow(lease: Lease) -> AsyncIterator[Frozen]:
            freezing.set()
            await go_on.wait()
            async with freeze(lease) as frozen:
                yield frozen

        provider.freeze = slow  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.fork, ME, box, 1)
            await freezing.wait()
            with pytest.raises(SandboxChanging, match="being forked, paused or resumed"):
                await service.run_for_client(CodeRun(ME, "1", box), background=True)
            go_on.set()


async def test_a_driver_without_snapshots_can_neither_fork_nor_pause(service: SandboxService, provider: FakeProvider):
    provider.freeze_error = CannotFreeze("bubblewrap")
    box = await with_file(service)
    for call in (service.fork(ME, box, 1), service.pause(ME, box)):
        with pytest.raises(CannotFreeze, match="Driver bubblewrap takes no snapshots"):
            await call
    assert states(service) == [State.READY]
    assert len(service.admission.holders) == 1


async def test_no_request_is_in_flight_while_a_machine_is_frozen(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    reading, go_on = anyio.Event(), anyio.Event()
    read = provider.agent.read

    async def slow_read(path: str, *, offset: int = 0, limit: int) -> Any:
        reading.set()
        await go_on.wait()
        assert provider.copies == []
        return await read(path, offset=offset, limit=limit)

    provider.agent.read = slow_read  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.read_all, ME, box, "f")
        await reading.wait()
        tasks.start_soon(service.fork, ME, box, 1)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(service.write, ME, box, "late", b"")  # waits until the fork releases the machine
        await anyio.wait_all_tasks_blocked()
        assert "/workspace/late" not in provider.agents[0].files
        go_on.set()
    assert "/workspace/late" in provider.agents[0].files
    assert "/workspace/late" not in provider.agents[1].files


# -- pauses ------------------------------------------------------------------------------------------------


async def test_a_paused_sandbox_has_no_machine_and_resumes_with_its_state(
    service: SandboxService, provider: FakeProvider
):
    box = await with_file(service)
    paused = await service.pause(ME, box)
    assert (paused.sandbox_id, paused.state) == (box, State.PAUSED)
    assert (provider.alive, provider.frozen, service.admission.holders) == (0, 1, [])
    assert states(service) == [State.PAUSED]
    resumed = await service.resume(ME, box)
    assert (resumed.sandbox_id, resumed.state) == (box, State.READY)
    assert provider.copies == [False]
    assert await service.read_all(ME, box, "f") == b"mine"
    assert (provider.alive, provider.frozen, len(service.admission.holders)) == (1, 0, 1)


async def test_pausing_and_resuming_twice_changes_nothing(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    for _ in range(2):
        assert (await service.pause(ME, box)).state == State.PAUSED
    for _ in range(2):
        assert (await service.resume(ME, box)).state == State.READY
    assert provider.copies == [False]


async def test_two_concurrent_resumes_thaw_one_machine(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    await service.pause(ME, box)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.resume, ME, box)
        tasks.start_soon(service.resume, ME, box)
    assert (provider.copies, states(service)) == ([False], [State.READY])


async def test_using_a_paused_sandbox_is_refused(service: SandboxService):
    box = await with_file(service)
    await service.pause(ME, box)
    calls = (
        service.run(CodeRun(ME, "1", box)),
        service.run_for_client(CodeRun(ME, "1", box), background=True),
        service.read_all(ME, box, "f"),
        service.write(ME, box, "f", b""),
        service.artifacts(ME, box),
        service.fork(ME, box, 1),
    )
    for call in calls:
        with pytest.raises(SandboxPaused, match=box):
            await call


async def test_results_can_be_read_while_the_sandbox_is_paused(service: SandboxService):
    box = await with_file(service)
    view = await service.run_for_client(CodeRun(ME, "1", box), background=True)
    assert view.run_id == "run-1"
    await service.stop_run(ME, box, "run-1")
    await service.pause(ME, box)
    page = await service.read_output(ME, box, "run-1", offset=0, wait_s=0)
    assert "ran" in page.page.text


async def test_a_paused_sandbox_does_not_become_idle(provider: FakeProvider):
    async with served(provider) as service:
        box = (await service.create(ME)).sandbox_id
        info = await service.pause(ME, box)
        assert info.expires_in_s == pytest.approx(info.ends_in_s, abs=1)
        (paused,) = service.alive()
        lifespan = paused.lifespan
        paused.lifespan = Lifespan(idle_s=0, ttl_s=lifespan.ttl_s)  # as if it had been idle for too long
        paused.slot.changed.set()
        await anyio.wait_all_tasks_blocked()
        assert states(service) == [State.PAUSED]
        paused.lifespan = lifespan
        assert (await service.resume(ME, box)).state == State.READY


async def test_a_paused_sandbox_still_reaches_its_maximum_age(provider: FakeProvider):
    async with served(provider) as service:
        box = (await service.create(ME)).sandbox_id
        await service.pause(ME, box)
        (paused,) = service.alive()
        paused.lifespan = Lifespan(idle_s=1000, ttl_s=0)  # as if its time had passed
        paused.slot.changed.set()
        await paused.ended.wait()
        with pytest.raises(SandboxExpired, match="maximum age of 0 s"):
            await service.resume(ME, box)
        assert provider.frozen == 0


async def test_closing_a_paused_sandbox_removes_its_frozen_state(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    await service.pause(ME, box)
    assert await service.close(ME, box)
    assert (provider.frozen, states(service)) == (0, [])
    with pytest.raises(SandboxNotFound, match="was closed"):
        await service.resume(ME, box)


async def test_a_pause_frees_a_place_and_a_resume_without_one_leaves_it_paused(provider: FakeProvider):
    async with served(provider, limits={"sandboxes": 1}) as service:
        box = await with_file(service)
        await service.pause(ME, box)
        other = await service.create(ME)
        with pytest.raises(LimitReached, match=r"limits\.sandboxes = 1"):
            await service.resume(ME, box)
        assert states(service) == [State.PAUSED, State.READY]
        await service.close(ME, other.sandbox_id)
        await service.resume(ME, box)
        assert await service.read_all(ME, box, "f") == b"mine"


async def test_the_limit_on_paused_sandboxes_is_enforced(provider: FakeProvider):
    async with served(provider, limits={"paused": 1}) as service:
        box, other = await with_file(service), await with_file(service)
        await service.pause(ME, box)
        with pytest.raises(LimitReached, match=r"limits\.paused = 1"):
            await service.pause(ME, other)
        assert states(service) == [State.PAUSED, State.READY]
        await service.resume(ME, box)
        await service.pause(ME, other)


async def test_a_sandbox_that_cannot_be_frozen_goes_on(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    provider.freeze_error = StartFailed("the disk is full")
    for call in (service.pause(ME, box), service.fork(ME, box, 1)):
        with pytest.raises(SandboxError, match="disk is full"):
            await call
    assert states(service) == [State.READY]
    assert await service.read_all(ME, box, "f") == b"mine"


async def test_a_pause_cancelled_while_the_state_is_saved_changes_nothing():
    class Quick(FakeProvider):
        @asynccontextmanager
        async def freeze(self, lease: Lease) -> AsyncIterator[Frozen]:
            with anyio.CancelScope(shield=True):
                stack = AsyncExitStack()
                frozen = await stack.enter_async_context(super().freeze(lease))
                scope.cancel()
            async with stack:
                yield frozen

    provider = Quick()
    async with served(provider) as service:
        box = await with_file(service)
        with anyio.CancelScope() as scope:
            await service.pause(ME, box)
        assert scope.cancelled_caught
        assert states(service) == [State.READY]
        assert await service.read_all(ME, box, "f") == b"mine"


async def test_a_failed_resume_leaves_the_sandbox_paused(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    await service.pause(ME, box)
    for error in (StartFailed("not now"), OSError("out of files")):
        provider.error = error  # type: ignore[assignment]
        with pytest.raises(SandboxError, match=str(error)):
            await service.resume(ME, box)
        assert states(service) == [State.PAUSED]
        assert service.admission.holders == []
    provider.error = None
    await service.resume(ME, box)
    assert await service.read_all(ME, box, "f") == b"mine"


async def test_an_unreadable_frozen_state_loses_the_sandbox(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    await service.pause(ME, box)
    provider.error = StateLost("its files are gone")
    for _ in range(2):
        with pytest.raises(MachineLost, match="its files are gone"):
            await service.resume(ME, box)
    assert (states(service), provider.frozen) == ([], 0)


async def test_a_machine_lost_after_a_resume_is_reported(service: SandboxService, provider: FakeProvider):
    box = await with_file(service)
    await service.pause(ME, box)
    await service.resume(ME, box)
    provider.agent.machine.ended.set()
    await provider.released.wait()
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(MachineLost, match="out of memory"):
        await service.run(CodeRun(ME, "1", box))


async def test_leaving_the_service_removes_frozen_states(provider: FakeProvider):
    async with served(provider) as service:
        await service.pause(ME, await with_file(service))
        assert provider.frozen == 1
