"""Recovery removes what dead servers left behind, and nothing else."""

import os
import signal
import sqlite3
import subprocess
import sys
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
from templates.store import Store
from vmm.hierarchy import detect
from vmm.process_table import ProcessId, is_alive, of_pid


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
def machine_process() -> Iterator[ProcessId]:
    """A process that recovery could mistake for a machine's."""
    with running() as process:
        yield process


def dead_process() -> ProcessId:
    with running() as process:
        return process


def record_dead_server(registry: Registry, *processes: ProcessId, **changes: object) -> Server:
    """Record a server that was killed while it had one machine."""
    server = replace(registry.server, process=dead_process(), **changes)  # type: ignore[arg-type]
    key = database.add_server(registry._db, server)
    machine = Machine(f"m-{key}", "template", MachineState.RUNNING, 0.0, "fake", "sandbox-1", processes)
    database.add_machine(registry._db, key, machine)
    database.update_machine(registry._db, machine)
    return server


async def clean(registry: Registry, home: Path) -> Cleaned:
    return await recover(registry, home / "run", Store(home))


async def test_a_process_that_outlived_its_server_is_killed(
    registry: Registry, tmp_path: Path, machine_process: ProcessId
):
    record_dead_server(registry, machine_process)
    cleaned = await clean(registry, tmp_path)
    assert not is_alive(machine_process)
    assert cleaned.processes == [f"process {machine_process.pid}"]
    assert list(await registry.read_all()) == [registry.server]


async def test_a_process_that_reuses_a_machines_pid_is_left_alone(
    registry: Registry, tmp_path: Path, machine_process: ProcessId
):
    record_dead_server(registry, ProcessId(machine_process.pid, machine_process.started - 1))
    cleaned = await clean(registry, tmp_path)
    assert is_alive(machine_process)
    assert (len(cleaned.servers), cleaned.processes) == (1, [])


async def test_the_machines_of_a_live_server_are_left_alone(tmp_path: Path, machine_process: ProcessId):
    async with open_registry(tmp_path) as other, open_registry(tmp_path) as registry:
        await other.starting("m-1", "template")
        other.started("m-1", "fake", "sandbox-1", machine_process.pid)
        (tmp_path / "run").mkdir()
        socket = tmp_path / "run" / f"{os.getpid()}-{other.server.process.started}-control"
        socket.touch()
        await other.read_all()  # waits for all its writes
        before = await registry.read_all()
        assert str(await clean(registry, tmp_path)) == "nothing"
        assert await registry.read_all() == before
        assert socket.exists()
    assert is_alive(machine_process)


@pytest.mark.parametrize("changes", [{"home": "of another"}, {"boot": "an earlier one"}])
async def test_records_of_another_home_or_boot_are_removed_and_their_processes_left_alone(
    registry: Registry, tmp_path: Path, machine_process: ProcessId, changes: dict[str, str]
):
    record_dead_server(registry, machine_process, **changes)
    await clean(registry, tmp_path)
    assert is_alive(machine_process)
    assert list(await registry.read_all()) == [registry.server]


async def test_a_server_in_another_pid_namespace_keeps_its_record_and_its_files(
    registry: Registry, tmp_path: Path, machine_process: ProcessId
):
    server = record_dead_server(registry, machine_process, namespace="pid:[1]")
    (tmp_path / "run").mkdir()
    socket = tmp_path / "run" / f"{server.process.pid}-{server.process.started}-control"
    socket.touch()
    assert str(await clean(registry, tmp_path)) == "nothing"
    assert is_alive(machine_process)
    assert server in await registry.read_all()
    assert socket.exists()


async def test_only_files_named_after_a_dead_server_are_removed(registry: Registry, tmp_path: Path):
    dead, alive = dead_process(), registry.server.process
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


def make_corrupt(home: Path) -> None:
    (home / database.FILE).write_bytes(b"this is no database" * 100)


@pytest.mark.parametrize("damage", [make_unreadable, make_foreign, make_corrupt])
async def test_no_file_is_removed_without_a_registry_of_all_servers(tmp_path: Path, damage: Callable[[Path], None]):
    """A server in another PID namespace looks dead from here; only its row says that it may be alive."""
    damage(tmp_path)
    foreign = dead_process()
    frozen = tmp_path / "run" / f"{foreign.pid}-{foreign.started}-frozen"
    frozen.mkdir(parents=True)
    async with open_registry(tmp_path) as registry:
        await clean(registry, tmp_path)
    assert frozen.exists()


async def test_no_file_is_removed_when_the_registry_becomes_unreadable(registry: Registry, tmp_path: Path):
    server = record_dead_server(registry, namespace="pid:[1]")
    socket = tmp_path / "run" / f"{server.process.pid}-{server.process.started}-control"
    socket.parent.mkdir()
    socket.touch()
    registry._db.execute("DROP TABLE machines")
    await clean(registry, tmp_path)
    assert socket.exists()


async def test_the_staging_directory_of_a_killed_build_is_removed(registry: Registry, tmp_path: Path):
    (tmp_path / "staging" / "image-abc.x").mkdir(parents=True)
    cleaned = await clean(registry, tmp_path)
    assert cleaned.files == [str(tmp_path / "staging" / "image-abc.x")]
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_failing_recovery_is_logged_and_the_server_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "staging" / "image-abc.x").mkdir(parents=True)
    (tmp_path / "locks" / "image-abc").mkdir(parents=True)  # where a file is expected
    with anyio.fail_after(20):
        async with open_operation(Settings(home=tmp_path), Store(tmp_path)) as operation:
            while "cleaning up after killed servers failed" not in caplog.text:
                await anyio.sleep(0.01)
            await operation.registry.starting("m-1", "template")
            assert [machine.id for machine in operation.registry.own()] == ["m-1"]
    assert "IsADirectoryError" in caplog.text


async def test_only_one_server_recovers_at_a_time(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record_dead_server(registry)
    inner: list[str] = []
    remove = registry.remove

    async def remove_during_another_recovery(server: Server) -> None:
        async with open_registry(tmp_path) as other:
            inner.append(str(await clean(other, tmp_path)))
        await remove(server)

    monkeypatch.setattr(registry, "remove", remove_during_another_recovery)
    assert str(await clean(registry, tmp_path)) == "servers: 1"
    assert inner == ["nothing"]


HIERARCHY = detect()


@pytest.mark.skipif(not HIERARCHY.folders, reason="cannot create cgroups here")
async def test_processes_in_the_cgroups_of_a_dead_server_are_killed_even_without_a_record(
    registry: Registry, tmp_path: Path, machine_process: ProcessId
):
    server = record_dead_server(registry, folders=HIERARCHY.folders)
    groups = [folder / f"{server.process.pid}-{server.process.started}-sandbox-1" for folder in HIERARCHY.folders]
    for group in groups:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(machine_process.pid))
    try:
        cleaned = await clean(registry, tmp_path)
        assert not is_alive(machine_process)
        assert [group for group in groups if group.exists()] == []
        assert len(cleaned.groups) == len(groups)
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()


MAKE_A_GROUP = """
import anyio
from vmm.limits import control_group, detect
from vmm.types import Limits

async def main():
    async with control_group(detect(), "sandbox-1", Limits()) as group:
        print(*group.directories(), sep="\\n", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.skipif(not HIERARCHY.folders, reason="no control groups can be made here")
async def test_the_cgroups_of_a_killed_server_are_removed_though_its_home_is_gone(tmp_path: Path):
    """Its registry went with its home, so only the names of the cgroups tell whose they were."""
    with subprocess.Popen([sys.executable, "-c", MAKE_A_GROUP], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        groups = [Path(server.stdout.readline().strip()) for _ in HIERARCHY.folders]
        server.kill()
    assert all(group.is_dir() for group in groups)
    async with open_registry(tmp_path, HIERARCHY.folders) as registry:
        cleaned = await clean(registry, tmp_path)
    assert [group for group in groups if group.exists()] == []
    assert {f"cgroup {group.name}" for group in groups} <= set(cleaned.groups)


async def test_a_server_whose_process_cannot_be_killed_keeps_its_record(
    registry: Registry, tmp_path: Path, machine_process: ProcessId, monkeypatch: pytest.MonkeyPatch
):
    server = record_dead_server(registry, machine_process)

    def refuse(handle: int, number: int) -> None:
        raise PermissionError("it belongs to another user")

    with monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", refuse)
        assert str(await clean(registry, tmp_path)) == "nothing"
    assert server in await registry.read_all()
    assert str(await clean(registry, tmp_path)) == "servers: 1, processes: 1"
