"""What Firecracker is asked, and how its changes are kept. What it shares with others is in test_vmm_microvm.py."""

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from tests.unit.microvms import MEMORY_MB, FakeMonitors
from vmm import memory
from vmm.drivers.firecracker import driver as driver_module
from vmm.drivers.firecracker import requests
from vmm.errors import SnapshotFailed
from vmm.microvm.driver import MIB, SAVED_MEMORY, MicroVmDriver
from vmm.types import DiskRate

PAGE = 4096


@pytest.fixture
def monitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMonitors:
    return FakeMonitors(tmp_path, monkeypatch)


@pytest.fixture
def driver(monitors: FakeMonitors) -> MicroVmDriver:
    return monitors.driver("firecracker")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left")


async def test_a_machine_is_configured_in_order_and_then_started(monitors: FakeMonitors, driver: MicroVmDriver):
    async with driver.launch(monitors.spec):
        requested = monitors.asked
    assert [(method, path) for method, path, _ in requested] == [
        ("PUT", "/machine-config"),
        ("PUT", "/cpu-config"),
        ("PUT", "/boot-source"),
        ("PUT", "/vsock"),
        ("PUT", "/drives/image"),
        ("PUT", "/drives/disk"),
        ("PUT", "/entropy"),
        ("PUT", "/actions"),
    ]
    bodies = {path: body for _, path, body in requested}
    assert bodies["/machine-config"] == {"vcpu_count": 2, "mem_size_mib": MEMORY_MB}
    assert bodies["/drives/image"]["is_read_only"] is True
    assert bodies["/cpu-config"]["cpuid_modifiers"] == [  # neither VMX nor SVM
        {
            "leaf": "0x1",
            "subleaf": "0x0",
            "flags": 0,
            "modifiers": [{"register": "ecx", "bitmap": f"0b{'x' * 26}0xxxxx"}],
        },
        {
            "leaf": "0x80000001",
            "subleaf": "0x0",
            "flags": 0,
            "modifiers": [{"register": "ecx", "bitmap": f"0b{'x' * 29}0xx"}],
        },
    ]
    assert "mcp_sandbox.vsock=1024" in bodies["/boot-source"]["boot_args"]


def test_both_drives_have_the_limits_of_the_template_and_none_by_default(monitors: FakeMonitors):
    limited = replace(monitors.spec, disk_rate=DiskRate(mb_per_s=20, iops=500))
    drives = [request.body for request in requests.boot(limited) if request.path.startswith("/drives/")]
    limits = {
        "bandwidth": {"size": 20 * MIB, "refill_time": 1000},
        "ops": {"size": 500, "refill_time": 1000},
    }
    assert [drive["rate_limiter"] for drive in drives if drive] == [limits, limits]
    assert "rate_limiter" not in json.dumps(requests.boot(monitors.spec))


def test_no_request_names_a_path_of_the_host(monitors: FakeMonitors):
    all_of_them = [*requests.boot(monitors.spec), requests.save(changes_only=True), requests.load((1, 16))]
    assert str(monitors.folder) not in json.dumps(all_of_them)


@pytest.mark.parametrize(
    ("release", "option"),
    [
        ((1, 10), "enable_diff_snapshots"),
        ((1, 12, 1), "enable_diff_snapshots"),
        ((1, 13), "track_dirty_pages"),
        ((1, 16, 1), "track_dirty_pages"),
        ((2, 0), "track_dirty_pages"),
    ],
)
def test_each_release_is_asked_to_track_changes_by_the_name_it_knows(release: tuple[int, ...], option: str):
    body = requests.load(release).body
    assert body is not None
    assert {name for name, value in body.items() if value is True} == {"resume_vm", option}


async def test_the_agents_stream_survives_a_snapshot_that_could_not_be_written(
    monitors: FakeMonitors, driver: MicroVmDriver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(driver_module, "_keep", full)
    async with driver.launch(monitors.spec) as machine, await machine.connect() as stream:
        assert await stream.receive(64) == b"CONNECT 1024\n"
        with pytest.raises(SnapshotFailed, match="no space left"):
            await driver.snapshot(machine, monitors.folder, keep=True)
        with anyio.fail_after(30):
            assert await stream.receive(64) == b"CONNECT 1024\n"  # of the new connection


async def test_a_machine_whose_changes_may_be_lost_is_saved_whole(monitors: FakeMonitors, driver: MicroVmDriver):
    folders = monitors.folders("saved", "first", "second", "third")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, folders[0])
    failing = monitors.driver("firecracker", refuse="/snapshot/create", times=1)
    async with failing.restore(saved, monitors.spec) as machine:
        with pytest.raises(SnapshotFailed, match="it is refused"):
            await failing.snapshot(machine, folders[1], keep=True)
        for folder in folders[2:]:
            await failing.snapshot(machine, folder, keep=True)
    kinds = [body["snapshot_type"] for _, path, body in monitors.asked if path == "/snapshot/create"]
    assert kinds == ["Full", "Diff", "Full", "Diff"]
    assert list(map(first_pages, folders[2:])) == [[b"a"] * 4, [b"a", b"a", b"c", b"a"]]


async def test_a_full_disk_gets_its_space_back_when_a_copy_fails(
    monitors: FakeMonitors, driver: MicroVmDriver, monkeypatch: pytest.MonkeyPatch
):
    def copy_half(source: int, target: int, size: int) -> None:
        os.pwrite(target, b"x" * (size // 2), 0)
        full()

    folders = monitors.folders("saved", "first", "second")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, folders[0])
    async with driver.restore(saved, monitors.spec) as machine, await machine.connect() as stream:
        assert await stream.receive(64) == b"CONNECT 1024\n"
        with monkeypatch.context() as patched:
            patched.setattr(memory, "copy_pages", copy_half)
            with pytest.raises(SnapshotFailed, match="no space left"):
                await driver.snapshot(machine, folders[1], keep=True)
        # Firecracker 1.16 would never answer if it had paused and gone on without a snapshot.
        with anyio.fail_after(30):
            await stream.send(b"the same connection")
            assert await stream.receive(64) == b"the same connection"
        assert os.fstat(machine.files[requests.NEW_MEMORY]).st_blocks == 0  # type: ignore[attr-defined]
        await driver.snapshot(machine, folders[2], keep=True)
    assert first_pages(folders[2]) == [b"a", b"\0", b"a", b"a"]


async def test_a_copy_that_could_not_be_written_does_not_prevent_the_next(
    monitors: FakeMonitors, driver: MicroVmDriver, monkeypatch: pytest.MonkeyPatch
):
    folders = monitors.folders("saved", "first", "second")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, folders[0])
    async with driver.restore(saved, monitors.spec) as machine:
        with monkeypatch.context() as patched:
            patched.setattr(memory, "save_sparse", full)
            with pytest.raises(SnapshotFailed, match="no space left"):
                await driver.snapshot(machine, folders[1], keep=True)
        await driver.snapshot(machine, folders[2], keep=True)
    assert first_pages(folders[2]) == [b"a", b"\0", b"c", b"a"]


async def test_each_copy_of_a_restored_machine_has_all_of_its_changes(monitors: FakeMonitors, driver: MicroVmDriver):
    folders = monitors.folders("saved", "first", "second")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, folders[0])
    async with driver.restore(saved, monitors.spec) as machine:
        for folder in folders[1:]:
            await driver.snapshot(machine, folder, keep=True)
        kinds = [body["snapshot_type"] for _, path, body in monitors.asked if path == "/snapshot/create"]
    assert kinds == ["Full", "Diff", "Diff"]
    assert list(map(first_pages, folders)) == [[b"a"] * 4, [b"a", b"\0", b"a", b"a"], [b"a", b"\0", b"c", b"a"]]


async def test_changes_are_found_on_file_systems_that_do_not_tell_holes_from_zeros(
    monitors: FakeMonitors, driver: MicroVmDriver, monkeypatch: pytest.MonkeyPatch
):
    def everything(_file: int, size: int) -> Iterator[tuple[int, int]]:
        yield 0, size

    monkeypatch.setattr(memory, "data_extents", everything)
    folders = monitors.folders("saved", "copy")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, folders[0])
    async with driver.restore(saved, monitors.spec) as machine:
        await driver.snapshot(machine, folders[1], keep=True)
    assert first_pages(folders[1]) == [b"a", b"\0", b"a", b"a"]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"short": PAGE}, f"it wrote {MEMORY_MB * MIB - PAGE} bytes of memory"),
        ({"state_bytes": 2 * MIB}, "bytes of state"),
    ],
)
async def test_what_a_monitor_saves_is_not_believed(behaviour: dict[str, object], reason: str, monitors: FakeMonitors):
    driver, (saved,) = monitors.driver("firecracker", **behaviour), monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        with pytest.raises(SnapshotFailed, match=reason):
            await driver.snapshot(machine, saved)


def first_pages(folder: Path) -> list[bytes]:
    """Return what each of the first pages of a saved memory consists of."""
    data = (folder / SAVED_MEMORY).read_bytes()
    pages = [data[at : at + PAGE] for at in range(0, 4 * PAGE, PAGE)]
    assert all(page == page[:1] * PAGE for page in pages)
    return [page[:1] for page in pages]
