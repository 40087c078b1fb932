"""The command lines and the probe of the qemu driver."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from vmm import limits
from vmm.driver import DRIVERS, DriverConfig, load_driver
from vmm.drivers.qemu import command, driver, probe
from vmm.errors import DriverUnavailable, SnapshotFailed
from vmm.probe import PROBE_WORD
from vmm.process import Confinement
from vmm.types import GUEST_KERNEL, Accel, DiskRate, Exit, GuestKernel, MachineSpec
from vmm.verdicts import Verdict


@pytest.fixture
def spec(tmp_path):
    return MachineSpec("box", tmp_path, GuestKernel(tmp_path, tmp_path), memory_mb=512, vcpus=2, disk_mb=64)


BOOTS = command.Descriptors(3, 4, 5, 6, 7, 8, 9)
RESTORES = command.Descriptors(3, 4, 5, 6, 7)


@pytest.mark.parametrize("files", [BOOTS, RESTORES])
@pytest.mark.parametrize("accel", list(Accel))
def test_every_machine_has_the_seccomp_sandbox_and_a_network_card_that_leads_nowhere(spec, accel, files):
    argv = command.machine_argv("qemu", spec, accel, files, shared=True, tsc_khz=None)
    assert argv[argv.index("-sandbox") + 1].startswith("on,")
    assert {"-nodefaults", "-no-user-config"} <= set(argv)
    devices = [argv[at + 1] for at, word in enumerate(argv) if word in ("-device", "-netdev", "-nic", "-net")]
    assert {device.partition(",")[0] for device in devices} == {
        "virtio-blk-device",
        "virtio-net-device",
        "virtio-serial-device",
        "virtserialport",
    }
    assert not {"-netdev", "-nic", "-net"} & set(argv)
    assert not [device for device in devices if "netdev=" in device]


def test_the_card_of_a_machine_with_a_tap_is_connected_to_it_and_otherwise_the_same(spec):
    without, with_tap = (
        command.machine_argv("qemu", spec, Accel.TCG, files, shared=True, tsc_khz=None)
        for files in (RESTORES, replace(RESTORES, tap=77))
    )
    assert set(with_tap) - set(without) == {
        "-netdev",
        "tap,id=net,fd=77",
        f"virtio-net-device,mac={command.MAC},netdev=net",
    }
    assert set(without) - set(with_tap) == {f"virtio-net-device,mac={command.MAC}"}
    assert 77 in replace(RESTORES, tap=77).all()


def test_a_machines_command_contains_no_path_of_the_host(spec, tmp_path):
    argv = command.machine_argv("qemu", spec, Accel.TCG, BOOTS, shared=True, tsc_khz=None)
    assert not [word for word in argv if str(tmp_path) in word]


def test_memory_is_mapped_privately_unless_it_is_shared(spec):
    def share(*, shared: bool) -> str:
        argv = command.machine_argv("qemu", spec, Accel.TCG, RESTORES, shared=shared, tsc_khz=None)
        return argv[argv.index("-object") + 1].rpartition(",")[2]

    assert (share(shared=True), share(shared=False)) == ("share=on", "share=off")


@pytest.mark.parametrize("files", [BOOTS, RESTORES])
def test_both_disks_are_behind_the_limits_of_the_template(spec, files):
    limited = replace(spec, disk_rate=DiskRate(mb_per_s=20))
    plain, argv = (
        command.machine_argv("qemu", one, Accel.TCG, files, shared=True, tsc_khz=None) for one in (spec, limited)
    )
    assert [word for word in argv if word.startswith("virtio-blk-device")] == [
        "virtio-blk-device,drive=limited-image",
        "virtio-blk-device,drive=limited-disk,werror=report,rerror=report",
    ]
    groups = [json.loads(word) for word in argv if "throttle-group" in word and word.startswith("{")]
    assert [group["limits"] for group in groups] == [{"bps-total": 20 * 1024 * 1024}] * 2
    assert not [word for word in plain if "throttle" in word or "limited" in word]


def test_an_emulated_guest_gets_the_rate_of_its_clock(spec):
    argv = command.machine_argv("qemu", spec, Accel.TCG, BOOTS, shared=True, tsc_khz=2_400_000)
    assert "tsc_early_khz=2400000" in argv[argv.index("-append") + 1]


def test_the_recipe_changes_with_the_command_line(monkeypatch):
    before = command.recipe(Accel.TCG)
    assert before == command.recipe(Accel.TCG) != command.recipe(Accel.KVM)
    monkeypatch.setattr(command, "LEAN_ARGS", "something=else")
    assert command.recipe(Accel.TCG) != before


def test_a_snapshot_from_a_host_with_another_clock_rate_is_refused(monkeypatch):
    monkeypatch.setattr("vmm.tsc.tsc_khz", lambda: 2_500_000)
    driver._check_rate("2499998")
    with pytest.raises(SnapshotFailed, match="another clock rate"):
        driver._check_rate("2600000")


@pytest.mark.parametrize("name", ["fake", "qemu.command", "no-such-driver", "../qemu"])
def test_only_registered_drivers_can_be_loaded(name, tmp_path):
    with pytest.raises(DriverUnavailable) as refused:
        load_driver(name, DriverConfig(tmp_path, tmp_path))
    assert refused.value.fix == f"choose one of: {', '.join(DRIVERS)}"


async def test_the_fix_on_a_host_without_qemu_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict = await load_driver("qemu", DriverConfig(tmp_path, tmp_path)).probe()
    assert (verdict.usable, verdict.fix, verdict.lacks) == (False, probe.INSTALL, None)


def fake_qemu(directory: Path, body: str) -> None:
    program = directory / "qemu-system-x86_64"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && echo 'QEMU emulator version 9.9' && exit 0\n{body}\n")
    program.chmod(0o755)


async def test_a_qemu_that_does_not_start_is_not_usable(monkeypatch, tmp_path):
    fake_qemu(tmp_path, "echo 'no such machine' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tmp_path.chmod(0o755)
    verdict = await load_driver("qemu", DriverConfig(tmp_path, tmp_path)).probe()
    assert (verdict.usable, verdict.version, verdict.lacks) == (False, "QEMU 9.9", GUEST_KERNEL)
    assert verdict.reason.startswith("QEMU does not start")


async def test_a_qemu_that_does_not_start_in_namespaces_runs_without_them_and_says_so(monkeypatch, tmp_path):
    fake_qemu(tmp_path, """echo '{"QMP": {}}'""")  # the namespaces have only programs of the system
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "own_user", lambda: None)  # another user would not reach it
    verdict, engine = await probe.probe(DriverConfig(tmp_path, tmp_path, accel=Accel.TCG), limits.detect())
    assert verdict.usable, verdict.reason
    assert engine is not None
    assert not engine.namespaces
    assert engine.command(["qemu"], Accel.TCG) == ["qemu"]
    assert engine.confinement(Accel.TCG).offline
    assert any("QEMU shares the host's files and processes" in text for text in verdict.missing_protections)


async def test_a_host_that_cannot_confine_a_process_is_not_usable(monkeypatch, tmp_path):
    fake_qemu(tmp_path, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def refused(confinement: Confinement) -> Verdict:
        return Verdict(False, "status 1: Operation not permitted", "grant it")

    monkeypatch.setattr(probe, "confinement_trouble", refused)
    verdict = await load_driver("qemu", DriverConfig(tmp_path, tmp_path)).probe()
    assert not verdict.usable
    assert "Operation not permitted" in verdict.reason
    assert verdict.fix == "grant it"


class FakeBoots:
    """Replaces the boot of a whole kernel, and counts the boots."""

    def __init__(self, monkeypatch, tiny: Verdict) -> None:
        self.boots = 0

        async def kvm(cache_dir: Path, *, own_kernel: bool) -> Verdict:
            return Verdict(None, "not tried") if own_kernel else tiny

        async def boot(*args: object) -> Exit:
            self.boots += 1
            return Exit(code=0, detail=f"Linux\n{PROBE_WORD}")

        monkeypatch.setattr("vmm.probe.kvm", kvm)
        monkeypatch.setattr(probe, "_boot", boot)


def engine(version: str) -> probe.Engine:
    return probe.Engine("qemu", version, namespaces=True)


def config(path: Path, *, own_kernel: bool = False) -> DriverConfig:
    return DriverConfig(path, path, kernel=GuestKernel(path, path), own_kernel=own_kernel)


async def test_no_kernel_is_booted_if_the_tiny_guest_fails(monkeypatch, tmp_path):
    no = Verdict(False, "it is paravirtual", "another host")
    fake = FakeBoots(monkeypatch, no)
    assert await probe.kvm_boots(config(tmp_path), engine("1")) == no
    assert fake.boots == 0


@pytest.mark.parametrize("tiny", [True, None])
async def test_kvm_is_usable_if_a_kernel_boots_and_the_result_is_cached(monkeypatch, tmp_path, tiny):
    fake = FakeBoots(monkeypatch, Verdict(tiny, "so far"))
    for _ in range(2):
        assert (await probe.kvm_boots(config(tmp_path), engine("1"))).reason == "a guest booted under KVM"
    assert fake.boots == 1
    await probe.kvm_boots(config(tmp_path), engine("2"))
    assert fake.boots == 2


async def test_a_custom_kernel_is_tried_where_ordinary_ones_cannot_run(monkeypatch, tmp_path):
    FakeBoots(monkeypatch, Verdict(False, "it is paravirtual"))
    assert (await probe.kvm_boots(config(tmp_path, own_kernel=True), engine("1"))).usable


async def test_without_a_kernel_the_fix_is_setup(monkeypatch, tmp_path):
    FakeBoots(monkeypatch, Verdict(True, "a tiny guest ran under KVM"))
    verdict = await probe.kvm_boots(DriverConfig(tmp_path, tmp_path), engine("1"))
    assert (verdict.usable, verdict.fix) == (False, "mcp-sandbox setup")
