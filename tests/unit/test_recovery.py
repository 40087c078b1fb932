"""What a dead server has left is removed, and nothing else."""

import os
import signal
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import Settings
from mcp_sandbox.operating import database
from mcp_sandbox.operating.database import Machine, MachineState, Server
from mcp_sandbox.operating.operation import open_operation
from mcp_sandbox.operating.recovery import Cleaned, recover
from mcp_sandbox.operating.registry import Registry, open_registry
from mcp_sandbox.processes import ProcessId, is_alive, of_pid
from templates.store import Store
from vmm.hierarchy import detect


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    async with open_registry(tmp_path) as registry:
        yield registry


@contextmanager
def running() -> Iterator[ProcessId]:
    with subprocess.Popen(["sleep", "600"]) as process:
        found = of_pid(process.pid)
        assert found is not None
        try:
            yield found
        finally:
            process.kill()


@pytest.fixture
def bystander() -> Iterator[ProcessId]:
    """A process that would be taken for a machine's."""
    with running() as process:
        yield process


def a_dead_process() -> ProcessId:
    with running() as process:
        return process


def leave(registry: Registry, *processes: ProcessId, **changes: object) -> Server:
    """Put a server on record that was killed while it had one machine."""
    server = replace(registry.server, process=a_dead_process(), **changes)  # type: ignore[arg-type]
    key = database.add_server(registry._db, server)
    machine = Machine(f"m-{key}", "template", MachineState.RUNNING, 0.0, "fake", "sandbox-1", processes)
    database.add_machine(registry._db, key, machine)
    database.update_machine(registry._db, machine)
    return server


async def clean(registry: Registry, home: Path) -> Cleaned:
    return await recover(registry, home / "run", Store(home))


async def test_a_process_that_outlived_its_server_is_ended(registry: Registry, tmp_path: Path, bystander: ProcessId):
    leave(registry, bystander)
    cleaned = await clean(registry, tmp_path)
    assert not is_alive(bystander)
    assert cleaned.processes == [f"process {bystander.pid}"]
    assert list(await registry.everything()) == [registry.server]


async def test_a_process_that_has_got_the_number_of_a_machine_is_not_touched(
    registry: Registry, tmp_path: Path, bystander: ProcessId
):
    leave(registry, ProcessId(bystander.pid, bystander.started - 1))
    cleaned = await clean(registry, tmp_path)
    assert is_alive(bystander)
    assert (len(cleaned.servers), cleaned.processes) == (1, [])


async def test_the_machines_of_a_server_that_lives_are_not_touched(tmp_path: Path, bystander: ProcessId):
    async with open_registry(tmp_path) as other, open_registry(tmp_path) as registry:
        await other.intend("m-1", "template")
        other.started("m-1", "fake", "sandbox-1", bystander.pid)
        (tmp_path / "run").mkdir()
        socket = tmp_path / "run" / f"{os.getpid()}-{other.server.process.started}-control"
        socket.touch()
        await other.everything()  # all that it was told is written
        before = await registry.everything()
        assert str(await clean(registry, tmp_path)) == "nothing"
        assert await registry.everything() == before
        assert socket.exists()
    assert is_alive(bystander)


@pytest.mark.parametrize("changes", [{"home": "of another"}, {"boot": "an earlier one"}])
async def test_what_is_on_record_for_another_home_or_boot_is_forgotten_but_not_touched(
    registry: Registry, tmp_path: Path, bystander: ProcessId, changes: dict[str, str]
):
    leave(registry, bystander, **changes)
    await clean(registry, tmp_path)
    assert is_alive(bystander)
    assert list(await registry.everything()) == [registry.server]


async def test_a_server_in_another_process_namespace_is_neither_touched_nor_forgotten(
    registry: Registry, tmp_path: Path, bystander: ProcessId
):
    server = leave(registry, bystander, namespace="pid:[1]")
    (tmp_path / "run").mkdir()
    socket = tmp_path / "run" / f"{server.process.pid}-{server.process.started}-control"
    socket.touch()
    assert str(await clean(registry, tmp_path)) == "nothing"
    assert is_alive(bystander)
    assert server in await registry.everything()
    assert socket.exists()


async def test_only_files_that_carry_the_name_of_a_dead_server_are_removed(registry: Registry, tmp_path: Path):
    dead, alive = a_dead_process(), registry.server.process
    run = tmp_path / "run"
    (run / f"{dead.pid}-{dead.started}-scratch" / "deep").mkdir(parents=True)
    (run / f"{dead.pid}-{dead.started}-control").touch()
    kept = {f"{alive.pid}-{alive.started}-control", "something-else-entirely", "tmp1234"}
    for name in kept:
        (run / name).touch()
    cleaned = await clean(registry, tmp_path)
    assert {path.name for path in run.iterdir()} == kept
    assert len(cleaned.files) == 2


def make_unreadable(home: Path) -> None:
    (home / database.FILE).mkdir()


def make_foreign(home: Path) -> None:
    with closing(sqlite3.connect(home / database.FILE)) as db:
        db.execute("PRAGMA user_version = 99")


def break_it(home: Path) -> None:
    (home / database.FILE).write_bytes(b"this is no database" * 100)


@pytest.mark.parametrize("spoil", [make_unreadable, make_foreign, break_it])
async def test_without_a_registry_that_knows_all_servers_no_file_is_removed(
    tmp_path: Path, spoil: Callable[[Path], None]
):
    """A server in another process namespace looks dead from here, and only its row tells that it is not."""
    spoil(tmp_path)
    stranger = a_dead_process()
    frozen = tmp_path / "run" / f"{stranger.pid}-{stranger.started}-frozen"
    frozen.mkdir(parents=True)
    async with open_registry(tmp_path) as registry:
        await clean(registry, tmp_path)
    assert frozen.exists()


async def test_when_the_registry_cannot_be_read_any_more_no_file_is_removed(registry: Registry, tmp_path: Path):
    server = leave(registry, namespace="pid:[1]")
    socket = tmp_path / "run" / f"{server.process.pid}-{server.process.started}-control"
    socket.parent.mkdir()
    socket.touch()
    registry._db.execute("DROP TABLE machines")
    await clean(registry, tmp_path)
    assert socket.exists()


async def test_what_a_killed_build_has_staged_is_removed(registry: Registry, tmp_path: Path):
    (tmp_path / "staging" / "image-abc.x").mkdir(parents=True)
    cleaned = await clean(registry, tmp_path)
    assert cleaned.files == [str(tmp_path / "staging" / "image-abc.x")]
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_clean_up_that_fails_is_told_and_ends_no_server(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "staging" / "image-abc.x").mkdir(parents=True)
    (tmp_path / "locks" / "image-abc").mkdir(parents=True)  # where a file is expected
    with anyio.fail_after(20):
        async with open_operation(Settings(home=tmp_path), Store(tmp_path)) as operation:
            while "clean-up after killed servers failed" not in caplog.text:
                await anyio.sleep(0.01)
            await operation.registry.intend("m-1", "template")
            assert [machine.id for machine in operation.registry.own()] == ["m-1"]
    assert "IsADirectoryError" in caplog.text


async def test_only_one_server_cleans_at_a_time(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leave(registry)
    inner: list[str] = []
    forget = registry.forget

    async def forget_while_another_looks(server: Server) -> None:
        async with open_registry(tmp_path) as other:
            inner.append(str(await clean(other, tmp_path)))
        await forget(server)

    monkeypatch.setattr(registry, "forget", forget_while_another_looks)
    assert str(await clean(registry, tmp_path)) == "servers: 1"
    assert inner == ["nothing"]


HIERARCHY = detect()


@pytest.mark.skipif(not HIERARCHY.folders, reason="no control groups can be made here")
async def test_what_is_in_the_control_groups_of_a_dead_server_is_ended_even_if_it_is_not_on_record(
    registry: Registry, tmp_path: Path, bystander: ProcessId
):
    server = leave(registry, folders=HIERARCHY.folders)
    groups = [folder / f"{server.process.pid}-{server.process.started}-sandbox-1" for folder in HIERARCHY.folders]
    for group in groups:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(bystander.pid))
    try:
        cleaned = await clean(registry, tmp_path)
        assert not is_alive(bystander)
        assert [group for group in groups if group.exists()] == []
        assert len(cleaned.groups) == len(groups)
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()


async def test_what_cannot_be_ended_stays_on_record(
    registry: Registry, tmp_path: Path, bystander: ProcessId, monkeypatch: pytest.MonkeyPatch
):
    server = leave(registry, bystander)

    def refuse(handle: int, number: int) -> None:
        raise PermissionError("it belongs to somebody else")

    with monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", refuse)
        assert str(await clean(registry, tmp_path)) == "nothing"
    assert server in await registry.everything()
    assert str(await clean(registry, tmp_path)) == "servers: 1, processes: 1"
