"""The firecracker driver against a program that has Firecracker's API and no machine.

tests/functional/test_emulated_host.py runs the real one, where it is installed.
"""

import errno
import gzip
import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream

from vmm import vmlinux, vsock
from vmm.driver import DriverConfig
from vmm.drivers.firecracker import api, probe, requests
from vmm.drivers.firecracker import driver as driver_module
from vmm.drivers.firecracker.driver import FirecrackerDriver
from vmm.drivers.firecracker.probe import Engine
from vmm.errors import LaunchFailed, MachineLost, SnapshotFailed
from vmm.limits import detect
from vmm.process import Confinement
from vmm.types import GuestKernel, MachineSpec, NetworkMode, Probe, Snapshot
from vmm.verdicts import Verdict

FAKE = Path(__file__).parent / "fake_firecracker.py"
PAGE = 4096
LOG = "requests.log"
Make = Callable[..., FirecrackerDriver]


@pytest.fixture
def spec(tmp_path: Path) -> MachineSpec:
    kernel = tmp_path / "vmlinux"
    kernel.write_bytes(vmlinux.ELF + b"kernel")
    for name in ("initramfs", "root"):
        (tmp_path / name).write_bytes(b"content")
    boot = GuestKernel(kernel, tmp_path / "initramfs")
    return MachineSpec("box", tmp_path / "root", boot, memory_mb=128, vcpus=2, disk_mb=64)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a driver whose Firecracker behaves as asked."""

    def made(**behaviour: object) -> FirecrackerDriver:
        machines = iter(range(100))

        def in_machine(_argv: list[str], files: dict[str, int]) -> list[str]:
            (root := tmp_path / f"root{next(machines)}").mkdir()
            monkeypatch.setattr(api, "ROOT", f"{root}")
            told = {"log": str(tmp_path / LOG), "root": str(root)}
            return [sys.executable, str(FAKE), json.dumps(files), json.dumps(told | behaviour)]

        monkeypatch.setattr(probe, "in_machine", in_machine)
        monkeypatch.setattr(driver_module, "kvm_confinement", lambda *, offline: Confinement(offline=offline))
        made = FirecrackerDriver(DriverConfig(run_dir=tmp_path / "run", cache_dir=tmp_path / "cache"))
        made._verdict, made._engine = Probe(True, "it works"), Engine(str(FAKE), "Firecracker 1.16.1")
        return made

    return made


def asked(tmp_path: Path) -> list[Any]:
    """Return the requests that Firecracker has got: method, path and body."""
    return [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]


async def first_line(stream: ByteStream) -> bytes:
    return await stream.receive(64)


async def test_a_machine_is_configured_in_order_and_then_started(make: Make, spec: MachineSpec, tmp_path: Path):
    async with make().launch(spec):
        requested = asked(tmp_path)
    assert [(method, path) for method, path, _ in requested] == [
        ("PUT", "/machine-config"),
        ("PUT", "/boot-source"),
        ("PUT", "/drives/image"),
        ("PUT", "/drives/disk"),
        ("PUT", "/vsock"),
        ("PUT", "/entropy"),
        ("PUT", "/actions"),
    ]
    bodies = {path: body for _, path, body in requested}
    assert bodies["/machine-config"] == {"vcpu_count": 2, "mem_size_mib": 128}
    assert bodies["/drives/image"]["is_read_only"] is True
    assert "mcp_sandbox.vsock=1024" in bodies["/boot-source"]["boot_args"]


async def test_no_request_names_a_path_of_the_host(spec: MachineSpec, tmp_path: Path):
    assert str(tmp_path) not in json.dumps([requests.boot(spec), requests.save(changes_only=True), requests.load()])


async def test_a_refused_machine_fails_with_firecrackers_reason_and_leaves_nothing(
    make: Make, spec: MachineSpec, tmp_path: Path
):
    with pytest.raises(LaunchFailed, match="/drives/disk: it is refused"):
        async with make(refuse="/drives/disk").launch(spec):
            pytest.fail("it started")
    assert list((tmp_path / "run").iterdir()) == []


async def test_a_firecracker_that_does_not_start_says_why(make: Make, spec: MachineSpec):
    with pytest.raises(LaunchFailed, match="cannot start"):
        async with make(die="start").launch(spec):
            pytest.fail("it started")


async def test_a_firecracker_that_dies_is_a_lost_machine(make: Make, spec: MachineSpec, tmp_path: Path):
    target = tmp_path / "saved"
    target.mkdir()
    driver = make(die="/snapshot/create")
    with pytest.raises(MachineLost, match="/snapshot/create"):
        async with driver.launch(spec) as machine:
            await driver.snapshot(machine, target)


async def test_the_agents_stream_opens_when_the_agent_listens_and_can_be_taken_once(make: Make, spec: MachineSpec):
    async with make(deaf=3).launch(spec) as machine, await machine.connect() as stream:
        assert await first_line(stream) == b"CONNECT 1024\n"
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"
        with pytest.raises(MachineLost, match="already taken"):
            await machine.connect()


async def test_an_answer_of_no_monitor_is_a_lost_machine(make: Make, spec: MachineSpec):
    async with make(greeting="SSH-2.0").launch(spec) as machine:
        with pytest.raises(MachineLost, match=r"SSH-2\.0"):
            await machine.connect()


async def test_the_agents_stream_survives_a_snapshot_of_a_machine_that_runs_on(
    make: Make, spec: MachineSpec, tmp_path: Path
):
    target = tmp_path / "saved"
    target.mkdir()
    driver = make()
    async with driver.launch(spec) as machine, await machine.connect() as stream, anyio.create_task_group() as tasks:
        assert await first_line(stream) == b"CONNECT 1024\n"
        received: list[bytes] = []

        async def listen() -> None:
            received.append(await stream.receive())

        tasks.start_soon(listen)
        with anyio.fail_after(30):
            await driver.snapshot(machine, target, keep=True)
        assert asked(tmp_path)[-1][1:] == ["/vm", {"state": "Resumed"}]
    assert received == [b"CONNECT 1024\n"]  # of the new connection


async def test_a_machine_runs_on_if_it_cannot_be_saved(make: Make, spec: MachineSpec, tmp_path: Path):
    target = tmp_path / "saved"
    target.mkdir()
    driver = make(refuse="/snapshot/create")
    async with driver.launch(spec) as machine:
        with pytest.raises(SnapshotFailed, match="it is refused"):
            await driver.snapshot(machine, target, keep=True)
        assert asked(tmp_path)[-1][1:] == ["/vm", {"state": "Resumed"}]


async def test_the_agents_stream_survives_a_snapshot_that_could_not_be_written(
    make: Make, spec: MachineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(driver_module, "_keep", full)
    driver = make()
    async with driver.launch(spec) as machine, await machine.connect() as stream:
        assert await first_line(stream) == b"CONNECT 1024\n"
        with pytest.raises(SnapshotFailed, match="no space left"):
            await driver.snapshot(machine, tmp_path, keep=True)
        with anyio.fail_after(30):
            assert await first_line(stream) == b"CONNECT 1024\n"  # of the new connection


async def test_a_machine_whose_changes_were_lost_is_not_copied_again(
    make: Make, spec: MachineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    folders = [tmp_path / name for name in ("saved", "first", "second")]
    for folder in folders:
        folder.mkdir()
    driver = make()
    async with driver.launch(spec) as machine:
        saved = await driver.snapshot(machine, folders[0])
    async with driver.restore(saved, spec) as machine:
        with monkeypatch.context() as patched:
            patched.setattr(driver_module, "_keep_changes", full)
            with pytest.raises(SnapshotFailed, match="no space left"):
                await driver.snapshot(machine, folders[1], keep=True)
        with pytest.raises(SnapshotFailed, match="cannot be copied any more"):
            await driver.snapshot(machine, folders[2], keep=True)


async def test_each_copy_of_a_restored_machine_has_all_of_its_changes(make: Make, spec: MachineSpec, tmp_path: Path):
    folders = [tmp_path / name for name in ("saved", "first", "second")]
    for folder in folders:
        folder.mkdir()
    driver = make()
    async with driver.launch(spec) as machine:
        saved = await driver.snapshot(machine, folders[0])
    async with driver.restore(saved, spec) as machine:
        for folder in folders[1:]:
            await driver.snapshot(machine, folder, keep=True)
        kinds = [body["snapshot_type"] for _, path, body in asked(tmp_path) if path == "/snapshot/create"]
    memories = [[chunk[:1] for chunk in pages(folder / driver_module.MEMORY)] for folder in folders]
    assert kinds == ["Full", "Diff", "Diff"]
    assert memories == [[b"a"] * 4, [b"a", b"b", b"a", b"a"], [b"a", b"b", b"c", b"a"]]


async def test_a_snapshot_that_is_gone_cannot_be_restored(make: Make, spec: MachineSpec, tmp_path: Path):
    with pytest.raises(SnapshotFailed, match="cannot be read"):
        async with make().restore(Snapshot("firecracker", tmp_path / "nowhere"), spec):
            pytest.fail("it started")


def pages(file: Path) -> list[bytes]:
    data = file.read_bytes()
    return [data[at : at + PAGE] for at in range(0, len(data), PAGE)]


@pytest.mark.parametrize(
    ("printed", "usable", "reason"),
    [
        ("Firecracker v1.16.1\n", True, "a tiny guest ran"),
        ("Firecracker v1.10.0\n", True, "a tiny guest ran"),
        ("Firecracker v1.9.1\n", False, "Firecracker 1.9.1 is too old: 1.10 is the oldest that works"),
        ("Hello\n", False, "does not say its version"),
    ],
)
async def test_the_version_is_asked_and_an_old_one_refused(
    printed: str, usable: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def says(*_: object) -> str:
        return printed

    async def works(*_: object, own_kernel: bool) -> Verdict:
        return Verdict(True, "a tiny guest ran")

    monkeypatch.setattr(probe, "find_tool", lambda _: "/usr/bin/firecracker")
    monkeypatch.setattr(probe, "version_output", says)
    monkeypatch.setattr("vmm.probe.kvm", works)
    verdict, _ = await probe.probe(DriverConfig(tmp_path, tmp_path), detect())
    assert verdict.usable is usable
    assert reason in verdict.reason


async def test_a_machine_has_no_network_device(make: Make, spec: MachineSpec):
    assert NetworkMode.NAT not in make().capabilities.networks


async def test_no_link_is_followed_to_a_socket_of_the_host(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "hosts.sock"))
        listening.listen()
        (tmp_path / "agent.sock").symlink_to("hosts.sock")
        directory = os.open(tmp_path, os.O_PATH)
        try:
            with pytest.raises(MachineLost):
                await vsock.connect(directory, "agent.sock")
        finally:
            os.close(directory)


def bzimage(payload: bytes) -> bytes:
    """Return a kernel image with one sector of setup code and this payload."""
    header = bytearray(2 * 512)
    header[vmlinux.SETUP_SECTORS_AT] = 1
    header[vmlinux.MAGIC_AT : vmlinux.MAGIC_AT + 4] = vmlinux.HEADER_MAGIC
    struct.pack_into("<II", header, vmlinux.PAYLOAD_AT, 0, len(payload))
    return bytes(header) + payload


async def test_the_kernel_is_taken_out_of_a_bzimage(tmp_path: Path):
    kernel = tmp_path / "vmlinuz"
    kernel.write_bytes(bzimage(gzip.compress(vmlinux.ELF + b"kernel")))
    file = await vmlinux.uncompressed(kernel)
    try:
        assert os.pread(file, 100, 0) == vmlinux.ELF + b"kernel"
    finally:
        os.close(file)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"", "is not a Linux kernel"),
        (b"x" * 4096, "is not a Linux kernel"),
        (bzimage(b"what is this?"), "compressed in an unknown way"),
        (bzimage(gzip.compress(b"no kernel")), "contains no ELF file"),
        (bzimage(gzip.compress(b"kernel" * 100)[:20]), "cannot be unpacked"),
    ],
)
async def test_what_is_no_kernel_is_refused_with_the_reason(image: bytes, reason: str, tmp_path: Path):
    kernel = tmp_path / "vmlinuz"
    kernel.write_bytes(image)
    with pytest.raises(LaunchFailed, match=reason):
        await vmlinux.uncompressed(kernel)
