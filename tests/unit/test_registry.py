"""The registry has a record of every machine, and a broken registry stops no server."""

import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from mcp_sandbox.errors import SandboxError, StartFailed
from mcp_sandbox.machines.provider import Lease, MachineRequest
from mcp_sandbox.operating import database
from mcp_sandbox.operating.database import Machine, MachineState
from mcp_sandbox.operating.registry import Registered, Registry, ServerStatus, open_registry, status_of, this_server
from tests.unit.fakes import REQUEST, TEMPLATE, FakeProvider
from vmm.process_table import ProcessId, of_pid


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    async with open_registry(tmp_path) as registry:
        yield registry


async def rows(registry: Registry) -> list[Machine]:
    return [machine for machines in (await registry.read_all()).values() for machine in machines]


class WithPid(FakeProvider):
    """A provider whose machines have the pid of this process."""

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        async with super().acquire(request) as lease:
            cast("Any", lease.machine).pid = os.getpid()
            yield lease


async def test_a_thawed_machine_has_a_record(registry: Registry):
    provider = Registered(FakeProvider(), registry)
    async with provider.acquire(REQUEST) as lease, provider.freeze(lease) as frozen:
        async with provider.thaw(frozen, copy=True):
            assert [(machine.template, machine.state) for machine in registry.own()] == [
                (TEMPLATE, MachineState.RUNNING)
            ] * 2
        assert len(registry.own()) == 1
    assert registry.own() == []


async def test_a_machine_has_a_record_from_before_it_starts_until_it_has_ended(registry: Registry):
    source = FakeProvider()
    source.hold = anyio.Event()
    states: list[MachineState] = []

    async def use() -> None:
        async with Registered(source, registry).acquire(REQUEST):
            states.extend(machine.state for machine in await rows(registry))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use)
        await source.waiting.wait()  # the source was called, so the row exists
        states.extend(machine.state for machine in await rows(registry))
        source.hold.set()
    assert states == [MachineState.STARTING, MachineState.RUNNING]
    assert await rows(registry) == []
    assert registry.own() == []


async def test_a_record_names_template_driver_machine_and_process(registry: Registry):
    async with Registered(WithPid(), registry).acquire(REQUEST):
        [row] = await rows(registry)
    assert (row.template, row.driver, row.machine_id) == (TEMPLATE, "fake", "fake")
    assert row.processes[0] == of_pid(os.getpid())


async def test_a_record_names_the_sandbox_and_its_owner(registry: Registry):
    async with Registered(WithPid(), registry).acquire(REQUEST):
        registry.claimed("fake", "sb-1", "alice")
        registry.claimed("another", "sb-2", "bob")
        [row] = await rows(registry)
    assert (row.sandbox, row.owner) == ("sb-1", "alice")


async def test_a_record_says_when_its_machine_is_being_torn_down(registry: Registry):
    source = FakeProvider()
    seen: list[MachineState] = []

    @asynccontextmanager
    async def slow(template: str) -> AsyncIterator[Lease]:
        async with source.acquire(MachineRequest(template)) as lease:
            yield lease
            seen.extend(machine.state for machine in await rows(registry))

    async with Registered(source, registry)._recorded(TEMPLATE, slow(TEMPLATE)):
        pass
    assert seen == [MachineState.ENDING]


async def test_a_machine_that_fails_to_start_leaves_no_row(registry: Registry):
    source = FakeProvider()
    source.error = StartFailed("no")
    with pytest.raises(SandboxError):
        async with Registered(source, registry).acquire(REQUEST):
            pass
    assert await rows(registry) == []


async def test_a_cancelled_start_leaves_no_row(registry: Registry):
    source = FakeProvider()
    for steps in range(8):
        async with anyio.create_task_group() as tasks:

            async def use() -> None:
                async with Registered(source, registry).acquire(REQUEST):
                    await anyio.sleep_forever()

            tasks.start_soon(use)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert await rows(registry) == []
    assert source.alive == 0


async def test_servers_share_one_registry_and_remove_their_rows_when_they_end(tmp_path: Path):
    async with open_registry(tmp_path) as one:
        await one.starting("m-1", TEMPLATE)
        async with open_registry(tmp_path) as other:
            await other.starting("m-2", TEMPLATE)
            assert {row.id for row in await rows(one)} == {"m-1", "m-2"}
            assert [row.id for row in one.own()] == ["m-1"]
        assert [row.id for row in await rows(one)] == ["m-1"]
    assert database.read_home(tmp_path) == {}


async def test_only_its_user_can_read_the_registry(tmp_path: Path, registry: Registry):
    assert (tmp_path / database.FILE).stat().st_mode & 0o077 == 0


async def test_a_commit_does_not_wait_for_the_disk(registry: Registry):
    assert registry._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert registry._db.execute("PRAGMA synchronous").fetchone() == (1,)  # NORMAL


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\0" + bytes(4096)])
async def test_a_corrupt_registry_is_moved_aside_and_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
):
    (tmp_path / database.FILE).write_bytes(content)
    async with open_registry(tmp_path) as registry:
        await registry.starting("m-1", TEMPLATE)
        assert [machine.id for [machine] in database.read_home(tmp_path).values()] == ["m-1"]
    [aside] = tmp_path.glob("registry.db.broken-*")
    assert aside.read_bytes() == content
    assert aside.name in caplog.text


async def test_rows_are_kept_in_memory_if_no_registry_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / database.FILE).mkdir()
    async with open_registry(tmp_path) as registry:
        await registry.starting("m-1", TEMPLATE)
        assert [row.id for row in await rows(registry)] == ["m-1"]
    assert "other processes will not see" in caplog.text


async def test_a_registry_of_another_version_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    db = sqlite3.connect(tmp_path / database.FILE)
    db.execute("PRAGMA user_version = 99")
    db.close()
    before = (tmp_path / database.FILE).read_bytes()
    async with open_registry(tmp_path):
        pass
    assert "another version" in caplog.text
    assert (tmp_path / database.FILE).read_bytes() == before


async def test_a_registry_that_breaks_later_is_logged_once_and_stops_no_machine(
    registry: Registry, caplog: pytest.LogCaptureFixture
):
    registry._db.execute("DROP TABLE machines")
    for _ in range(2):
        async with Registered(FakeProvider(), registry).acquire(REQUEST):
            pass
    assert await registry.read_all() == {}
    assert caplog.text.count("cannot write to the registry") == 1


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold the write lock, as a process stopped in the middle of a write does."""
    with closing(sqlite3.connect(home / database.FILE, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


async def test_a_locked_registry_delays_only_one_start_and_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("mcp_sandbox.operating.registry.ADD_TIMEOUT_S", 0.01)
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.5)
    async with open_registry(tmp_path) as registry:
        source = Registered(FakeProvider(), registry)
        with locked(tmp_path):
            async with source.acquire(REQUEST):
                assert "locked" not in caplog.text  # the start did not wait for the writer thread
            await registry.remove(registry.server)  # waits for the writer thread
            assert "locked" in caplog.text
            assert registry._db.execute("PRAGMA busy_timeout").fetchone() == (0,)
        async with source.acquire(REQUEST):
            assert await rows(registry) == registry.own()
        assert registry._db.execute("PRAGMA busy_timeout").fetchone() == (500,)


async def test_a_late_row_is_written_before_it_is_deleted(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mcp_sandbox.operating.registry.ADD_TIMEOUT_S", 0.0)
    blocked = threading.Event()
    registry._do(lambda: blocked.wait(10))
    async with Registered(FakeProvider(), registry).acquire(REQUEST):
        blocked.set()
        assert [row.state for row in await rows(registry)] == [MachineState.RUNNING]
    assert await rows(registry) == []


async def test_a_failing_registry_is_logged_once_a_minute(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail() -> None:
        raise sqlite3.OperationalError("the disk is full")

    for _ in range(3):
        registry._do(fail)
        await registry.read_all()
    assert caplog.text.count("cannot write to the registry") == 1
    monkeypatch.setattr(registry, "_warn_at", 0.0)  # a minute later
    registry._do(fail)
    await registry.read_all()
    assert caplog.text.count("cannot write to the registry") == 2


async def test_a_home_that_cannot_be_created_stops_no_server(tmp_path: Path):
    (tmp_path / "file").touch()
    async with open_registry(tmp_path / "file" / "home") as registry:
        await registry.starting("m-1", TEMPLATE)
        assert [row.id for row in await rows(registry)] == ["m-1"]


def test_reading_a_home_without_a_registry_creates_none(tmp_path: Path):
    assert database.read_home(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_server_in_another_pid_namespace_is_neither_alive_nor_gone(tmp_path: Path):
    here = this_server(tmp_path)
    gone = replace(here, process=ProcessId(here.process.pid, here.process.started + 1))
    assert status_of(here, here) is ServerStatus.ALIVE
    assert status_of(gone, here) is ServerStatus.GONE
    assert status_of(replace(gone, namespace="pid:[1]"), here) is ServerStatus.UNKNOWN
    assert status_of(replace(here, boot="before the reboot"), here) is ServerStatus.GONE
    assert status_of(replace(here, home="of the home this one was copied from"), here) is ServerStatus.GONE
