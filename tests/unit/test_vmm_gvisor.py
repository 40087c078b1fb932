"""The configuration of gVisor machines, and which gVisor is used."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from vmm.driver import DriverConfig, load_driver
from vmm.drivers.gvisor import OLDEST, RUNSC, command, driver, probe
from vmm.errors import SnapshotFailed
from vmm.scratch import scratch_mb
from vmm.types import OVERHEAD_MB, GuestCode, MachineSpec, Probe

MIB = 1024 * 1024


@pytest.fixture
def spec(tmp_path):
    return MachineSpec("box", tmp_path / "root", GuestCode(tmp_path / "agent"), memory_mb=512, vcpus=1, disk_mb=1024)


def fake_runsc(directory: Path, version: str) -> Path:
    directory.mkdir(exist_ok=True)
    program = directory / "runsc"
    program.write_text(f"#!/bin/sh\necho 'runsc version {version}'\n")
    program.chmod(0o755)
    return program


def test_a_machine_has_no_network_and_a_read_only_root(spec):
    assert "--network=none" in command.runsc_argv("runsc", "systrap")
    bundle = json.loads(command.config_json(spec, "/image"))
    assert bundle["root"]["readonly"] is True
    assert {"type": "network"} in bundle["linux"]["namespaces"]


def test_every_writable_file_system_has_a_size(spec):
    bundle = json.loads(command.config_json(spec, "/image"))
    writable = {mount["destination"]: mount["options"] for mount in bundle["mounts"] if mount["type"] == "tmpfs"}
    assert {"/workspace", "/tmp", "/var/tmp", "/dev/shm", "/run"} == set(writable)
    assert all(any(option.startswith("size=") for option in options) for options in writable.values())


def test_files_in_all_writable_places_fit_into_what_the_host_gives_a_machine(spec):
    for memory_mb in (128, 512, 65536):
        assert sum(scratch_mb(replace(spec, memory_mb=memory_mb)).values()) < memory_mb + OVERHEAD_MB / 2


def test_the_host_gives_a_machine_its_memory_and_a_fixed_overhead(spec):
    limits = driver._limits(spec)
    assert limits.memory_bytes == (spec.memory_mb + OVERHEAD_MB) * MIB
    assert limits.cpus == spec.vcpus
    assert limits.file_bytes == 3072 * MIB  # the memory file grows by gigabytes, and most of it is empty
    assert driver._limits(replace(spec, memory_mb=1024)).file_bytes == 4096 * MIB


def test_the_sentrys_own_memory_is_limited_on_hosts_without_cgroups(spec):
    assert driver._limits(spec).data_bytes == 256 * MIB
    assert driver._limits(replace(spec, memory_mb=4096)).data_bytes == 1024 * MIB


def test_a_machines_config_contains_no_path_of_the_host(spec, tmp_path):
    bundle = command.config_json(spec, "/proc/self/fd/7").decode()
    assert str(tmp_path) not in bundle
    assert "bind" not in {mount["type"] for mount in json.loads(bundle)["mounts"]}


def test_the_recipe_changes_with_the_machines_config(monkeypatch):
    before = command.recipe()
    assert before == command.recipe()
    monkeypatch.setattr(command, "CAPABILITIES", ("CAP_KILL",))
    assert command.recipe() != before


async def test_the_fetched_gvisor_is_preferred_to_the_systems(monkeypatch, tmp_path):
    fetched = fake_runsc(tmp_path / "own", "0.0~20240729.0")
    monkeypatch.setenv("PATH", f"{fake_runsc(tmp_path / 'system', 'release-20250101.0').parent}:{os.environ['PATH']}")
    assert await probe.find_binary(DriverConfig(tmp_path, tmp_path, program=fetched)) == (
        (fetched, "runsc 20240729"),
        "",
    )


async def test_an_old_gvisor_is_not_usable_and_setup_fixes_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{fake_runsc(tmp_path / 'system', '0.0~20221219.0').parent}:{os.environ['PATH']}")
    verdict = await load_driver("gvisor", DriverConfig(tmp_path, tmp_path)).probe()
    assert not verdict.usable
    assert "20221219" in verdict.reason
    assert (verdict.fix, verdict.lacks) == (probe.SETUP, RUNSC)


async def test_a_gvisor_that_runs_no_program_is_not_usable(tmp_path):
    verdict = await load_driver("gvisor", DriverConfig(tmp_path, tmp_path, program=broken_runsc(tmp_path))).probe()
    assert (verdict.usable, verdict.lacks) == (False, None)
    assert all(platform in verdict.reason for platform in probe.PLATFORMS)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The platforms that were tried. A program runs on each."""
    tried: list[str] = []

    async def run(_config: DriverConfig, _binary: Path, platform: str) -> None:
        tried.append(platform)

    monkeypatch.setattr(probe, "_try", run)
    return tried


async def probed(directory: Path) -> Probe:
    """The verdict of a server that starts with a new driver."""
    program = directory / "own" / "runsc"
    return await load_driver("gvisor", DriverConfig(directory, directory / "cache", program=program)).probe()


async def test_the_next_server_does_not_try_gvisor_again(tmp_path, tries):
    fake_runsc(tmp_path / "own", "0.0~20240729.0")
    first = await probed(tmp_path)
    assert first.usable
    assert await probed(tmp_path) == first
    assert tries == ["systrap"]


@pytest.mark.usefixtures("tries")
async def test_the_next_server_does_not_start_gvisor_to_learn_its_release(tmp_path, monkeypatch):
    fake_runsc(tmp_path / "own", "0.0~20240729.0")
    first = await probed(tmp_path)
    monkeypatch.setattr(probe, "version_output", AsyncMock(side_effect=AssertionError("it was started")))
    assert await probed(tmp_path) == first


async def test_another_gvisor_is_tried_again(tmp_path, tries):
    for release in ("0.0~20240729.0", "0.0~20250101.10"):
        fake_runsc(tmp_path / "own", release)
        assert (await probed(tmp_path)).usable
    assert len(tries) == 2


async def test_gvisor_is_tried_again_by_a_server_with_other_privileges(tmp_path, tries, monkeypatch):
    fake_runsc(tmp_path / "own", "0.0~20240729.0")
    await probed(tmp_path)
    monkeypatch.setattr(probe, "privileges", lambda: {"status": ["CapEff: 0"]})
    await probed(tmp_path)
    assert len(tries) == 2


async def test_a_failed_try_of_gvisor_is_not_remembered(tmp_path, tries, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_try", AsyncMock(return_value="no user namespaces"))
        fake_runsc(tmp_path / "own", "0.0~20240729.0")
        assert not (await probed(tmp_path)).usable
    assert (await probed(tmp_path)).usable
    assert tries == ["systrap"]


def broken_runsc(directory: Path) -> Path:
    program = fake_runsc(directory / "broken", "0.0~20240729.0")
    program.write_text(program.read_text() + '[ "$1" = --version ]\n')
    return program


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("runsc version 0.0~20221219.0\nspec: 1.0.2-dev", False),  # Debian 12
        ("runsc version release-20231113.0", False),
        ("runsc version VERSION_MISSING", False),
        ("", False),
        ("runsc version 0.0~20240729.0\nspec: 1.2.0", True),  # Debian 13
        ("runsc version release-20240101.0", True),
        ("runsc version release-20260105.0-3-gab12", True),
    ],
)
def test_releases_from_2024_on_are_good_enough(version: str, good: bool):
    assert (probe.release_in(version) >= OLDEST) is good


def test_a_checkpoint_becomes_ours_and_its_files_readable_for_all_machines(tmp_path):
    (tmp_path / "pages.img").write_bytes(b"pages")
    (tmp_path / "pages.img").chmod(0o600)
    driver._take_over(tmp_path)
    assert (tmp_path / "pages.img").stat().st_mode & 0o777 == 0o644
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_checkpoint_that_contains_other_things_than_files_is_refused(tmp_path, kind):
    image = tmp_path / "image"
    image.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("mine")
    outside.chmod(0o600)
    if kind == "link":
        (image / "pages.img").symlink_to(outside)
    else:
        os.mkfifo(image / "pages.img")
    with pytest.raises((OSError, SnapshotFailed)):
        driver._take_over(image)
    assert outside.stat().st_mode & 0o777 == 0o600
