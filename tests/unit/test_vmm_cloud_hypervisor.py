"""What Cloud Hypervisor is asked, and what is kept of what it saves. What it shares is in test_vmm_microvm.py."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.microvms import MEMORY_MB, FakeMonitors
from vmm.driver import DriverConfig, load_driver
from vmm.drivers.cloud_hypervisor import requests
from vmm.drivers.cloud_hypervisor.state import without_memory
from vmm.errors import SnapshotFailed
from vmm.limits import ControlGroup
from vmm.microvm.driver import MIB, SAVED_MEMORY, MicroVmDriver
from vmm.types import DiskRate
from vmm.verdicts import Verdict

SIZE = MEMORY_MB * MIB
PARTS = [(0, SIZE - MIB), (1 << 32, MIB)]  # below and above the hole for devices


@pytest.fixture
def monitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMonitors:
    return FakeMonitors(tmp_path, monkeypatch)


@pytest.fixture
def driver(monitors: FakeMonitors) -> MicroVmDriver:
    return monitors.driver("cloud-hypervisor")


def state_of(manager: object) -> bytes:
    """Return the state of a machine as Cloud Hypervisor writes it."""
    data = {"snapshots": {}, "snapshot_data": {"state": json.dumps(manager)}}
    return json.dumps({"snapshots": {"cpu-manager": {}, "memory-manager": data}, "snapshot_data": None}).encode()


def manager_of(parts: list[tuple[int, int]], offsets: Sequence[int] = (0, 0)) -> dict[str, Any]:
    """Return what is saved of memory; of a machine that has booted, all of it has the offset 0."""
    return {
        "memory_ranges": {"data": [{"gpa": gpa, "length": size} for gpa, size in parts]},
        "guest_ram_mappings": [
            {"slot": slot, "gpa": gpa, "size": size, "zone_id": "memory", "file_offset": offset}
            for slot, ((gpa, size), offset) in enumerate(zip(parts, offsets, strict=False))
        ],
        "boot_ram": SIZE,
    }


async def test_a_machine_is_created_then_booted(monitors: FakeMonitors, driver: MicroVmDriver):
    async with driver.launch(monitors.spec):
        requested = monitors.asked
    assert [(method, path) for method, path, _ in requested] == [
        ("PUT", "/api/v1/vm.create"),
        ("PUT", "/api/v1/vm.boot"),
    ]
    config = requested[0][2]
    assert config["cpus"] == {"boot_vcpus": 2, "max_vcpus": 2, "nested": False}
    assert [zone["size"] for zone in config["memory"]["zones"]] == [SIZE]
    assert "mcp_sandbox.vsock=1024" in config["payload"]["cmdline"]
    assert (config["serial"]["mode"], config["console"]["mode"]) == ("Off", "Off")
    assert "net" not in config


def test_every_disk_is_said_to_be_raw_so_that_no_guest_can_pass_its_own_off_as_another_kind(monitors: FakeMonitors):
    disks = requests.config(monitors.spec)["disks"]
    assert [(disk["path"], disk["readonly"], disk["image_type"]) for disk in disks] == [
        ("/files/image", True, "Raw"),
        ("/files/disk", False, "Raw"),
    ]


@pytest.mark.parametrize("restored", [False, True])
def test_both_disks_have_the_limits_of_the_template_and_none_by_default(monitors: FakeMonitors, restored: bool):
    limited = requests.config(replace(monitors.spec, disk_rate=DiskRate(iops=500)), restored=restored)
    limits = {"ops": {"size": 500, "refill_time": 1000}}
    assert [disk["rate_limiter_config"] for disk in limited["disks"]] == [limits, limits]
    assert "rate_limiter" not in json.dumps(requests.config(monitors.spec, restored=restored))


def test_no_request_names_a_path_of_the_host(monitors: FakeMonitors):
    config = requests.config(monitors.spec, restored=True)
    assert str(monitors.folder) not in json.dumps(
        [*requests.boot(monitors.spec), requests.save(), requests.load(), config]
    )


@pytest.mark.parametrize(
    ("version", "lacks"), [("40.0", 4), ("49.0.1", 4), ("50.0", 4), ("50.2", 3), ("51.2", 2), ("53.0.0", 0)]
)
async def test_what_an_old_release_does_not_protect_from_is_told(
    version: str, lacks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def works(*_: object, own_kernel: bool) -> Verdict:
        return Verdict(True, "a tiny guest ran")

    monkeypatch.setattr("vmm.probe.kvm", works)
    for module in ("vmm.probe", "vmm.microvm.probe"):
        monkeypatch.setattr(f"{module}.KVM_DEVICE", Path(os.devnull))
    binary = tmp_path / "monitor"
    binary.write_text(f"#!/bin/sh\necho cloud-hypervisor v{version}\n")
    binary.chmod(0o755)
    verdict = await load_driver("cloud-hypervisor", DriverConfig(tmp_path, tmp_path, binary=binary)).probe()
    told = [sentence for sentence in verdict.missing_protections if "Cloud Hypervisor" in sentence]
    assert (verdict.usable, len(told)) == (True, lacks)


async def test_its_own_seccomp_filters_are_on(driver: MicroVmDriver):
    assert list(driver.argv("program"))[-2:] == ["--seccomp", "true"]


async def test_a_restored_machine_maps_the_saved_memory_privately_by_a_configuration_of_ours(
    monitors: FakeMonitors, driver: MicroVmDriver
):
    (saved,) = monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        snapshot = await driver.snapshot(machine, saved)
    assert (saved / SAVED_MEMORY).read_bytes() == b"memory".ljust(SIZE, b"\0")
    async with driver.restore(snapshot, monitors.spec) as machine:
        files = machine.files  # type: ignore[attr-defined]
        read = {
            link: json.loads(Path(f"/proc/self/fd/{files[link]}").read_bytes()) for link in files if "saved" in link
        }
    assert [path for _, path, _ in monitors.asked[-2:]] == ["/api/v1/vm.restore", "/api/v1/vm.resume"]
    assert monitors.asked[-2][2] == {"source_url": "file:///files/saved", "prefault": False}
    config = read["/files/saved/config.json"]  # not the one that the monitor has written
    assert config["memory"]["zones"] == [{"id": "memory", "size": SIZE, "shared": False, "file": "/files/memory"}]
    assert "initramfs" not in config["payload"]
    manager = read["/files/saved/state.json"]["snapshots"]["memory-manager"]["snapshot_data"]["state"]
    assert json.loads(manager)["memory_ranges"] == {"data": []}


async def test_a_machine_can_be_saved_again(monitors: FakeMonitors, driver: MicroVmDriver):
    async with driver.launch(monitors.spec) as machine:
        for folder in monitors.folders("first", "second"):
            await driver.snapshot(machine, folder, keep=True)
            assert (folder / SAVED_MEMORY).stat().st_size == SIZE
            assert list((monitors.roots[0] / "new").iterdir()) == []


async def test_a_machine_may_take_more_memory_only_while_it_is_saved(
    monitors: FakeMonitors, driver: MicroVmDriver, monkeypatch: pytest.MonkeyPatch
):
    history: list[object] = []

    @contextmanager
    def widened(_group: ControlGroup, more: int) -> Iterator[None]:
        history.append(more)
        yield
        history.append([path for _, path, _ in monitors.asked][-1])
        history.append(list((monitors.roots[0] / "new").iterdir()))

    monkeypatch.setattr(ControlGroup, "widened", widened)
    (saved,) = monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        await driver.snapshot(machine, saved, keep=True)
    assert history == [SIZE, "/api/v1/vm.snapshot", []]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"link": "/etc/passwd"}, "symbolic links"),
        ({"folder": True}, "its memory-ranges is no file"),
        ({"short": 4096}, f"it wrote {SIZE - 4096} bytes of memory"),
        ({"state": "{}"}, "saves machines in another way"),
        ({"state": "[" * 100_000}, "saves machines in another way"),
        ({"state_bytes": 2 * MIB}, "bytes of state"),
    ],
)
async def test_what_a_monitor_saves_is_not_believed(behaviour: dict[str, object], reason: str, monitors: FakeMonitors):
    driver, (saved,) = monitors.driver("cloud-hypervisor", **behaviour), monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        descriptors = os.listdir("/proc/self/fd")
        with pytest.raises(SnapshotFailed, match=reason):
            await driver.snapshot(machine, saved, keep=True)
        assert os.listdir("/proc/self/fd") == descriptors
        assert [path.name for path in (monitors.roots[0] / "new").iterdir() if path.is_file()] == []


@pytest.mark.parametrize("offsets", [(0, 0), (0, SIZE - MIB)], ids=["booted", "restored"])
def test_memory_is_taken_out_of_a_state_and_each_mapping_gets_its_part_of_the_file(offsets: tuple[int, int]):
    """A machine with more than 3 GB has memory below and above the addresses of devices."""
    after = json.loads(without_memory(state_of(manager_of(PARTS, offsets)), SIZE))
    left = json.loads(after["snapshots"]["memory-manager"]["snapshot_data"]["state"])
    assert left == manager_of(PARTS, (0, SIZE - MIB)) | {"memory_ranges": {"data": []}}
    assert after["snapshots"]["cpu-manager"] == {}


def swapped() -> dict[str, Any]:
    manager = manager_of(PARTS)
    manager["guest_ram_mappings"].reverse()
    return manager


SUMLESS: list[tuple[int, Any]] = [(0, 10**400), (1, 1.5)]  # sizes that cannot be added


@pytest.mark.parametrize(
    "manager",
    [swapped(), manager_of(PARTS[:1]), manager_of([]), manager_of(SUMLESS), {}, None, {"memory_ranges": []}],
)
def test_a_state_with_memory_in_another_layout_is_refused(manager: object):
    with pytest.raises(SnapshotFailed, match="in another way"):
        without_memory(state_of(manager), SIZE)


@pytest.mark.parametrize("state", [b"", b"null", b"{}", b'{"snapshots": {"memory-manager": {"snapshot_data": null}}}'])
def test_what_is_no_state_is_refused(state: bytes):
    with pytest.raises(SnapshotFailed, match="in another way"):
        without_memory(state, SIZE)
