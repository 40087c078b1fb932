"""Calls that are cancelled at every await leave nothing behind."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import anyio
import anyio.lowlevel
import pytest

from guest.client.messages import WarmUp
from guest.protocol import MAX_BODY
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxClosed, SandboxError
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.runs.requests import CodeRun, CommandRun
from mcp_sandbox.sandboxes.lifecycle import State
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunProgress
from templates.build import Builder, BuiltTemplate
from templates.catalogue import Catalogue
from tests.unit.cancel_everywhere import cancel_at_each_iteration
from tests.unit.fake_driver import STATE, FakeDriver, Memory
from tests.unit.fake_guest import FakeGuest
from tests.unit.fakes import TEMPLATE
from vmm.types import GuestKernel, Snapshot

if TYPE_CHECKING:
    from anyio.abc import ByteStream

    from vmm.driver import SnapshotDriver

ME = "me"


class Bench:
    """The service with the real provider, the real protocol and machines of the fake driver."""

    def __init__(self, path: Path) -> None:
        self.guests: list[FakeGuest] = []
        self.driver = FakeDriver(self._guest)
        self.run_dir = path / "run"
        (path / STATE).write_text("{}")
        built = BuiltTemplate(
            Catalogue().load(TEMPLATE), path, GuestKernel(path, path), WarmUp(), Snapshot("fake", path)
        )

        class StubBuilder:
            def stamp(self) -> tuple[int, ...]:
                return ()

            async def find(self, *_: object) -> BuiltTemplate:
                await anyio.lowlevel.checkpoint()
                return built

        driver = cast("SnapshotDriver", self.driver)
        builds = Builds(driver, cast("Builder", StubBuilder()), Catalogue())
        provider = LocalProvider(driver, builds, max_restores=2, run_dir=self.run_dir)
        self.service = SandboxService(provider, Settings(limits={"sandboxes": 3}))

    async def _guest(self, stream: "ByteStream", memory: Memory) -> None:
        self.guests.append(FakeGuest(memory))
        await self.guests[-1].serve(stream)

    async def nothing_left(self) -> None:
        """Wait until nothing is left of any sandbox while the service still runs."""
        while self.driver.running or self.service.alive():
            await anyio.lowlevel.checkpoint()
        assert self.service.admission.holders == []
        assert self.service.admission.waiting == 0
        assert self.frozen() == []

    async def only(self, only: str) -> None:
        """Wait until nothing is left but this sandbox and its machine."""
        while len(self.driver.running) > 1 or [box.id for box in self.service.alive()] != [only] or self.frozen():
            await anyio.lowlevel.checkpoint()
        assert len(self.service.admission.holders) == 1

    def frozen(self) -> list[Path]:
        return list(self.run_dir.glob("*"))

    async def count(self, box: str) -> str:
        return (await self.service.run(CodeRun(ME, "count", box))).stdout.head.strip()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    with anyio.fail_after(60):
        async with bench.service:
            yield bench
        await bench.nothing_left()
        await bench.driver.aclose()


@asynccontextmanager
async def sandbox(bench: Bench) -> AsyncIterator[str]:
    box = (await bench.service.create(ME)).sandbox_id
    yield box
    await bench.service.close(ME, box)
    await bench.nothing_left()


async def test_a_creation_cancelled_anywhere_leaves_nothing(bench: Bench):
    boxes: list[str] = []

    async def create() -> None:
        box = await bench.service.create(ME)
        await anyio.lowlevel.checkpoint_if_cancelled()  # then the caller never gets the answer
        boxes.append(box.sandbox_id)

    async def check() -> None:
        for box in boxes:
            await bench.service.close(ME, box)
        await bench.nothing_left()

    assert await cancel_at_each_iteration(create, check) > 5
    assert bench.driver.restored > 5


async def test_a_creation_cancelled_while_it_waits_for_a_place_leaves_the_queue(bench: Bench):
    taken = [(await bench.service.create("other")).sandbox_id for _ in range(3)]
    for iterations in range(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.service.create, ME)
            for _ in range(iterations):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        while bench.service.admission.waiting:
            await anyio.lowlevel.checkpoint()
    assert len(bench.service.admission.holders) == 3
    for box in taken:
        await bench.service.close("other", box)
    await bench.nothing_left()


async def test_a_one_off_run_cancelled_anywhere_leaves_nothing(bench: Bench):
    async def run() -> None:
        await bench.service.run(CodeRun(ME, "count"))

    assert await cancel_at_each_iteration(run, bench.nothing_left) > 10
    assert bench.service.sandboxes(ME) == []


async def test_a_run_cancelled_anywhere_leaves_a_working_sandbox(bench: Bench):
    async with sandbox(bench) as box:

        async def run() -> None:
            await bench.service.run(CodeRun(ME, "count", box))

        async def check() -> None:
            assert await bench.count(box) == str(bench.guests[-1].count)
            assert bench.guests[-1].run is None

        assert await cancel_at_each_iteration(run, check) > 3
        assert bench.guests[-1].count > 3
    assert len(bench.guests) == 1


@pytest.mark.parametrize(("code", "kept"), [("forever", True), ("stubborn", False)])
async def test_a_cancelled_run_keeps_its_state_or_the_next_result_reports_the_loss(bench: Bench, code: str, kept: bool):
    async with sandbox(bench) as box:
        assert await bench.count(box) == "1"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.service.run, CodeRun(ME, code, box))
            while bench.guests[-1].run is None:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        after = await bench.service.run(CodeRun(ME, "count", box))
        assert after.stdout.head.strip() == ("2" if kept else "1")
        assert after.lost_before is not kept
        assert (await bench.service.run(CodeRun(ME, "count", box))).lost_before is False


async def test_a_command_cancelled_anywhere_leaves_the_runs_beside_it(bench: Bench):
    async with sandbox(bench) as box:
        await bench.service.run_for_client(CommandRun(ME, "forever", box), background=True)

        async def run() -> None:
            await bench.service.run(CommandRun(ME, "true", box))

        async def check() -> None:
            while len(bench.guests[-1].commands) > 1:
                await anyio.lowlevel.checkpoint()
            assert await bench.count(box) == str(bench.guests[-1].count)
            assert bench.service.sandboxes(ME)[0].run_ids[:1] == ["run-1"]

        assert await cancel_at_each_iteration(run, check) > 3
        assert len(bench.guests[-1].commands) == 1


async def test_input_cancelled_anywhere_leaves_a_run_that_takes_more(bench: Bench):
    async with sandbox(bench) as box:
        view = await bench.service.run_for_client(CommandRun(ME, "forever", box, stdin_open=True))
        assert isinstance(view, RunProgress)

        async def send() -> None:
            await bench.service.write_stdin(ME, box, view.run_id, b"0123456789" * 2)

        async def check() -> None:
            await bench.service.write_stdin(ME, box, view.run_id, b".")
            assert bench.guests[-1].input.endswith(b".")

        assert await cancel_at_each_iteration(send, check) > 1


@pytest.mark.parametrize("size", [10, 3 * MAX_BODY])
async def test_a_transfer_cancelled_anywhere_leaves_no_partial_file_and_a_working_sandbox(bench: Bench, size: int):
    async with sandbox(bench) as box:
        guest = bench.guests[-1]
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: bench.service.write(ME, box, "f", b"x" * size),
            lambda: bench.service.read_all(ME, box, "f"),
        ]

        async def check() -> None:
            assert await bench.count(box) == str(guest.count)
            assert guest.uploads == {}
            assert set(map(len, guest.files.values())) <= {size}

        for call in calls:
            assert await cancel_at_each_iteration(call, check) > 1
        assert len(await bench.service.read_all(ME, box, "f")) == size


async def test_a_close_cancelled_anywhere_still_completes(bench: Bench):
    boxes = [(await bench.service.create(ME)).sandbox_id]

    async def close() -> None:
        await bench.service.close(ME, boxes[-1])

    async def check() -> None:
        if bench.service.sandboxes(ME):  # cancelled before it started
            await bench.service.close(ME, boxes[-1])
        await bench.nothing_left()
        boxes.append((await bench.service.create(ME)).sandbox_id)

    assert await cancel_at_each_iteration(close, check) > 1
    await bench.service.close(ME, boxes[-1])


@pytest.mark.parametrize("background", [True, False])
async def test_closing_ends_the_active_run_too(bench: Bench, background: bool):
    box = (await bench.service.create(ME)).sandbox_id

    async def run() -> None:
        with suppress(SandboxClosed):
            await bench.service.run_for_client(CodeRun(ME, "forever", box), background=background)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while not bench.guests[-1].run:
            await anyio.lowlevel.checkpoint()
        assert await bench.service.close(ME, box)
    await bench.nothing_left()


async def test_a_fork_cancelled_anywhere_leaves_no_copy_and_a_working_original(bench: Bench):
    async with sandbox(bench) as box:
        copies: list[str] = []
        counted = 0

        async def fork() -> None:
            made = await bench.service.fork(ME, box, 2)
            await anyio.lowlevel.checkpoint_if_cancelled()  # then the caller never gets the answer
            copies.extend(copy.sandbox_id for copy in made)

        async def check() -> None:
            nonlocal counted
            for copy in copies:
                assert await bench.count(copy) == str(counted + 1)
                await bench.service.close(ME, copy)
            await bench.only(box)
            counted += 1
            assert await bench.count(box) == str(counted)

        assert await cancel_at_each_iteration(fork, check) > 10


async def test_a_pause_cancelled_anywhere_leaves_a_sandbox_that_is_ready_or_can_be_resumed(bench: Bench):
    async with sandbox(bench) as box:
        counted, states = 0, set()

        async def pause() -> None:
            await bench.service.pause(ME, box)

        async def check() -> None:
            nonlocal counted
            states.add(bench.service.sandboxes(ME)[0].state)
            await bench.service.resume(ME, box)
            await bench.only(box)
            counted += 1
            assert await bench.count(box) == str(counted)

        assert await cancel_at_each_iteration(pause, check) > 5
        assert states == {State.READY, State.PAUSED}


async def test_a_resume_cancelled_anywhere_leaves_a_sandbox_that_is_paused_or_ready(bench: Bench):
    async with sandbox(bench) as box:
        counted, states = 0, set()
        await bench.service.pause(ME, box)

        async def resume() -> None:
            await bench.service.resume(ME, box)

        async def check() -> None:
            nonlocal counted
            states.add(bench.service.sandboxes(ME)[0].state)
            await bench.service.resume(ME, box)
            counted += 1
            assert await bench.count(box) == str(counted)
            await bench.only(box)
            await bench.service.pause(ME, box)
            assert bench.driver.running == []
            assert bench.service.admission.holders == []
            assert len(bench.frozen()) == 1

        assert await cancel_at_each_iteration(resume, check) > 5
        assert states == {State.READY, State.PAUSED}


async def test_closing_a_sandbox_during_a_fork_pause_or_resume_leaves_nothing(bench: Bench):
    async def cycle(box: str) -> None:
        with suppress(SandboxError):
            await bench.service.fork(ME, box, 1)
            await bench.service.pause(ME, box)
            await bench.service.resume(ME, box)

    for iterations in range(0, 200, 3):
        box = (await bench.service.create(ME)).sandbox_id
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cycle, box)
            for _ in range(iterations):
                await anyio.lowlevel.checkpoint()
            await bench.service.close(ME, box)
        for copy in bench.service.sandboxes(ME):
            await bench.service.close(ME, copy.sandbox_id)
        await bench.nothing_left()
