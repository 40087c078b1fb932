"""Who is at fault when the files of a snapshot cannot be read."""

import errno
import os
from pathlib import Path

import pytest

from vmm.driver import DriverConfig, load_driver
from vmm.drivers.gvisor import driver as gvisor
from vmm.errors import LaunchFailed, SnapshotFailed
from vmm.snapshot_files import NO_ROOM, reading
from vmm.types import GuestCode, MachineSpec, Snapshot


@pytest.mark.parametrize("number", sorted(NO_ROOM), ids=errno.errorcode.get)
def test_a_host_without_room_is_no_damaged_snapshot(number: int, tmp_path: Path):
    no_room = pytest.raises(LaunchFailed, match="this host has no room for another machine")
    with no_room, reading(Snapshot("toy", tmp_path)):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_a_damaged_snapshot(number: int, tmp_path: Path):
    damaged = pytest.raises(SnapshotFailed, match=f"the snapshot in {tmp_path} cannot be read")
    with damaged, reading(Snapshot("toy", tmp_path)):
        raise OSError(number, os.strerror(number))


async def test_gvisor_without_open_files_left_keeps_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_path: Path) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    (tmp_path / gvisor.IMAGE).mkdir()
    (tmp_path / gvisor.IMAGE / "checkpoint.img").touch()
    monkeypatch.setattr(gvisor, "trusted", full)
    driver = load_driver("gvisor", DriverConfig(tmp_path / "run", tmp_path / "cache"))
    assert isinstance(driver, gvisor.GvisorDriver)
    spec = MachineSpec("box", tmp_path, GuestCode(tmp_path), memory_mb=512, vcpus=1, disk_mb=64)
    with pytest.raises(LaunchFailed, match="too many open files"):
        async with driver.restore(Snapshot("gvisor", tmp_path), spec):
            pytest.fail("it started")
