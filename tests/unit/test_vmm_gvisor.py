"""The configuration of gVisor machines, and which gVisor is used."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tests.unit.fake_runsc import NEW, OF_2022, OF_2024, fake_runsc
from vmm.driver import DriverConfig, load_driver
from vmm.drivers.gvisor import RUNSC, command, driver, probe, release
from vmm.drivers.gvisor.release import Release
from vmm.errors import SnapshotFailed
from vmm.scratch import scratch_mb
from vmm.types import OVERHEAD_MB, GuestCode, MachineSpec, Probe

MIB = 1024 * 1024


@pytest.fixture
def spec(tmp_path):
    return MachineSpec("box", tmp_path / "root", GuestCode(tmp_path / "agent"), memory_mb=512, vcpus=1, disk_mb=1024)


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
    found, _reason = await probe.find_binary(DriverConfig(tmp_path, tmp_path, program=fetched))
    assert found is not None
    assert (found[0], found[1].version) == (fetched, "runsc 20240729")


async def test_the_gvisor_of_the_settings_is_the_only_one_that_counts(monkeypatch, tmp_path):
    fetched = fake_runsc(tmp_path / "own", "0.0~20240729.0")
    chosen = fake_runsc(tmp_path / "chosen", "release-20260105.0", NEW)
    found, _reason = await probe.find_binary(DriverConfig(tmp_path, tmp_path, program=fetched, binary=chosen))
    assert found == (
        chosen,
        Release("runsc 20260105", (*release.NEEDED, "restore --background", "--restore-spec-validation")),
    )
    chosen.unlink()
    verdict = await load_driver("gvisor", DriverConfig(tmp_path, tmp_path, program=fetched, binary=chosen)).probe()
    assert (verdict.usable, verdict.fix, verdict.lacks) == (False, probe.OTHER_SETTING, None)
    assert str(chosen) in verdict.reason


async def test_an_old_gvisor_is_not_usable_and_setup_fixes_it(monkeypatch, tmp_path):
    system = fake_runsc(tmp_path / "system", "0.0~20221219.0", OF_2022)
    monkeypatch.setenv("PATH", f"{system.parent}:{os.environ['PATH']}")
    verdict = await load_driver("gvisor", DriverConfig(tmp_path, tmp_path)).probe()
    assert not verdict.usable
    assert verdict.reason == f"{system} is runsc 20221219, which is too old: it has no `checkpoint --compression`"
    assert (verdict.fix, verdict.lacks) == (probe.SETUP, RUNSC)


async def test_a_gvisor_that_runs_no_program_is_not_usable(tmp_path):
    verdict = await load_driver(
        "gvisor", DriverConfig(tmp_path, tmp_path, program=fake_runsc(tmp_path / "own"))
    ).probe()
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
    assert first.program == tmp_path / "own" / "runsc"
    assert first.features == release.NEEDED


async def test_the_next_server_does_not_ask_gvisor_for_its_options_again(tmp_path, tries, monkeypatch):
    fake_runsc(tmp_path / "own", "0.0~20240729.0")
    first = await probed(tmp_path)
    monkeypatch.setattr(release, "ask", AsyncMock(side_effect=AssertionError))
    assert await probed(tmp_path) == first


async def test_another_gvisor_is_tried_again(tmp_path, tries):
    for version in ("0.0~20240729.0", "0.0~20250101.10"):
        fake_runsc(tmp_path / "own", version)
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


@pytest.mark.parametrize(
    ("version", "date"),
    [
        ("runsc version 0.0~20221219.0\nspec: 1.0.2-dev", "20221219"),  # Debian 12
        ("runsc version 0.0~20240729.0\nspec: 1.2.0", "20240729"),  # Debian 13
        ("runsc version release-20260105.0-3-gab12", "20260105"),
        ("runsc version VERSION_MISSING\nspec: 1.2.1", None),  # built with the go command
    ],
)
def test_the_version_of_a_release_is_its_date(version: str, date: str | None):
    assert release.date_in(version) == date


async def asked(program: Path) -> Release:
    with program.open("rb") as file:
        found = await release.ask(file.fileno())
    assert found is not None
    return found


async def test_a_build_without_a_date_is_used_if_it_has_the_options(tmp_path):
    built = await asked(fake_runsc(tmp_path / "built", "VERSION_MISSING", NEW))
    assert built.missing == ()
    assert "SHA-256" in built.version
    assert built != await asked(fake_runsc(tmp_path / "other", "VERSION_MISSING ", NEW))  # its snapshots do not fit


async def test_a_release_gets_only_options_that_it_has(tmp_path):
    old, new = await asked(fake_runsc(tmp_path / "old")), await asked(fake_runsc(tmp_path / "new", options=NEW))
    assert old.arguments("checkpoint") == ["--compression=none", "--exclude-committed-zero-pages=true"]
    assert (old.arguments("restore"), old.arguments("flags")) == ([], [])
    assert (new.arguments("restore"), new.arguments("flags")) == (
        ["--background=true"],
        ["--restore-spec-validation=ignore"],
    )


async def test_what_is_cached_of_a_release_is_what_it_said(tmp_path):
    for options in (OF_2024, NEW):
        found = await asked(fake_runsc(tmp_path / "own", options=options))
        assert Release.parse(found.dump()) == found


async def test_a_program_that_does_not_run_is_no_gvisor(tmp_path):
    program = fake_runsc(tmp_path)
    program.write_text("#!/bin/sh\nexit 1\n")
    with program.open("rb") as file:
        assert await release.ask(file.fileno()) is None


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
