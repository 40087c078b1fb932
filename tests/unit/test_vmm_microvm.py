"""What both drivers of microVMs do, against a program that has the monitors' APIs and no machine.

tests/functional/test_emulated_host.py runs the real ones, where they are installed.
"""

import errno
import json
import os
import re
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from anyio.abc import ByteStream

from tests.unit.microvms import NAMES, FakeMonitors
from vmm import cpu, memory, vsock
from vmm.driver import Machine
from vmm.errors import LaunchFailed, MachineLost, SnapshotFailed
from vmm.microvm import api, probe
from vmm.microvm import driver as driver_module
from vmm.microvm import machine as machine_module
from vmm.microvm.api import MAX_ANSWER
from vmm.microvm.driver import SAVED_MEMORY
from vmm.microvm.machine import MicroVm
from vmm.types import NetworkMode, Snapshot

SAVING = {"firecracker": "/snapshot/create", "cloud-hypervisor": "/api/v1/vm.snapshot"}
LAST = {"firecracker": "/actions", "cloud-hypervisor": "/api/v1/vm.boot"}
LOADING = {"firecracker": "/snapshot/load", "cloud-hypervisor": "/api/v1/vm.restore"}
RESUMING = {"firecracker": ["/vm", {"state": "Resumed"}], "cloud-hypervisor": ["/api/v1/vm.resume", None]}

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def monitors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMonitors:
    return FakeMonitors(tmp_path, monkeypatch)


async def first_line(stream: ByteStream) -> bytes:
    return await stream.receive(64)


async def test_a_refused_machine_fails_with_the_monitors_reason_and_leaves_nothing(name: str, monitors: FakeMonitors):
    with pytest.raises(LaunchFailed, match=f"{LAST[name]}: .*it is refused"):
        async with monitors.driver(name, refuse=LAST[name]).launch(monitors.spec):
            pytest.fail("it started")
    assert list((monitors.folder / "run").iterdir()) == []


@pytest.mark.parametrize(("fault", "shown"), [("plain words", "plain words"), ([], "status 400"), (7, "7")])
async def test_any_form_of_a_refusal_is_understood(name: str, fault: object, shown: str, monitors: FakeMonitors):
    with pytest.raises(LaunchFailed, match=shown):
        async with monitors.driver(name, refuse=LAST[name], fault=fault).launch(monitors.spec):
            pytest.fail("it started")


async def test_a_monitor_that_dies_when_it_should_boot_is_a_failed_launch(name: str, monitors: FakeMonitors):
    with pytest.raises(LaunchFailed, match=LAST[name]):
        async with monitors.driver(name, die=LAST[name]).launch(monitors.spec):
            pytest.fail("it started")


async def test_a_monitor_that_refuses_to_greet_is_a_failed_launch(name: str, monitors: FakeMonitors):
    driver = monitors.driver(name)
    with pytest.raises(LaunchFailed, match="it is refused"):
        async with monitors.driver(name, refuse=driver.monitor.hello.path).launch(monitors.spec):
            pytest.fail("it started")


async def test_an_endless_answer_is_not_read(name: str, monitors: FakeMonitors):
    with pytest.raises(LaunchFailed, match="an answer of more than 65536 bytes"):
        async with monitors.driver(name, refuse=LAST[name], chatter=MAX_ANSWER + 1).launch(monitors.spec):
            pytest.fail("it started")


async def test_a_socket_that_is_none_is_a_failed_launch_and_leaves_no_open_file(
    name: str, monitors: FakeMonitors, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(api, "API_SOCKET", "files")
    before = open_files()
    with pytest.raises(LaunchFailed, match="files of the machine is no socket"):
        async with monitors.driver(name).launch(monitors.spec):
            pytest.fail("it started")
    assert open_files() == before


def open_files() -> set[str]:
    """Return what this process has open, but for what pytest and the event loop use."""
    places = {entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    return {str(place) for place in places if place.is_dir()}


async def test_a_monitor_that_does_not_start_says_why(name: str, monitors: FakeMonitors):
    with pytest.raises(LaunchFailed, match="cannot start"):
        async with monitors.driver(name, die="start").launch(monitors.spec):
            pytest.fail("it started")


async def test_a_monitor_that_dies_is_a_lost_machine(name: str, monitors: FakeMonitors):
    driver, (target,) = monitors.driver(name, die=SAVING[name]), monitors.folders("saved")
    with pytest.raises(MachineLost, match=SAVING[name]):
        async with driver.launch(monitors.spec) as machine:
            await driver.snapshot(machine, target)


async def test_a_booted_machine_has_no_kernel_to_boot_again(name: str, monitors: FakeMonitors):
    async with monitors.driver(name).launch(monitors.spec):
        assert {link.name for link in (monitors.roots[0] / "files").iterdir()} >= {"image", "disk", "initramfs"}
        assert not (monitors.roots[0] / "files/kernel").is_symlink()


async def test_the_agents_stream_opens_when_the_agent_listens_and_can_be_taken_once(name: str, monitors: FakeMonitors):
    async with monitors.driver(name, deaf=3).launch(monitors.spec) as machine, await machine.connect() as stream:
        assert await first_line(stream) == b"CONNECT 1024\n"
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"
        with pytest.raises(MachineLost, match="already taken"):
            await machine.connect()


async def test_a_connection_that_the_guest_does_not_answer_is_tried_again(
    name: str, monitors: FakeMonitors, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine_module, "ANSWER_S", 0.05)
    with anyio.fail_after(60):
        async with monitors.driver(name, silent=2).launch(monitors.spec) as machine, await machine.connect() as stream:
            assert await first_line(stream) == b"CONNECT 1024\n"


async def test_a_connection_that_the_guest_accepts_and_resets_is_made_again(name: str, monitors: FakeMonitors):
    with anyio.fail_after(60):
        async with monitors.driver(name, resets=3).launch(monitors.spec) as machine, await machine.connect() as stream:
            await stream.send(b"hello")
            assert await stream.receive(len("CONNECT 1024\n")) == b"CONNECT 1024\n"
            assert await stream.receive() == b"hello"


async def test_a_guest_that_resets_every_connection_is_given_up(name: str, monitors: FakeMonitors):
    with anyio.fail_after(60):
        async with monitors.driver(name, resets=4).launch(monitors.spec) as machine, await machine.connect() as stream:
            await stream.send(b"hello")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()


async def test_no_more_is_kept_for_another_connection_than_a_few_requests(
    name: str, monitors: FakeMonitors, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vsock, "MAX_UNANSWERED", len(b"hello") - 1)
    with anyio.fail_after(60):
        async with monitors.driver(name, resets=1).launch(monitors.spec) as machine, await machine.connect() as stream:
            with suppress(anyio.BrokenResourceError):  # if the reset is here already
                await stream.send(b"hello")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()


async def test_a_connection_that_ends_after_an_answer_stays_ended(name: str, monitors: FakeMonitors):
    async with monitors.driver(name).launch(monitors.spec) as machine, await machine.connect() as stream:
        assert await first_line(stream) == b"CONNECT 1024\n"
        await stream.send_eof()  # the echo ends with it
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()


@pytest.mark.parametrize("removed", [True, False])
async def test_a_machine_that_ends_before_its_agent_listens_says_how(name: str, removed: bool, monitors: FakeMonitors):
    with anyio.fail_after(60):
        async with monitors.driver(name).launch(monitors.spec) as machine:
            assert isinstance(machine, MicroVm)
            if removed:
                (monitors.roots[0] / "mcp-sandbox-agent").unlink()  # as Cloud Hypervisor does
            with os.fdopen(os.pidfd_open(machine.pid)) as process:
                os.kill(machine.pid, signal.SIGKILL)
                await anyio.wait_readable(process)  # until it has ended
            with pytest.raises(MachineLost, match="machine box ended with signal 9"):
                await machine.connect()


async def test_an_answer_of_no_monitor_is_a_lost_machine(name: str, monitors: FakeMonitors):
    async with monitors.driver(name, greeting="SSH-2.0").launch(monitors.spec) as machine:
        with pytest.raises(MachineLost, match=r"SSH-2\.0"):
            await machine.connect()


async def test_the_agents_stream_survives_a_snapshot_of_a_machine_that_runs_on(name: str, monitors: FakeMonitors):
    driver, (target,) = monitors.driver(name), monitors.folders("saved")
    async with (
        driver.launch(monitors.spec) as machine,
        await machine.connect() as stream,
        anyio.create_task_group() as tasks,
    ):
        assert await first_line(stream) == b"CONNECT 1024\n"
        received: list[bytes] = []

        async def listen() -> None:
            received.append(await stream.receive())

        tasks.start_soon(listen)
        with anyio.fail_after(30):
            await driver.snapshot(machine, target, keep=True)
        assert monitors.asked[-1][1:] == RESUMING[name]
    assert received == [b"CONNECT 1024\n"]  # of the new connection


async def test_a_machine_that_ends_during_its_snapshot_keeps_its_files_until_that_is_done(
    name: str, monitors: FakeMonitors, monkeypatch: pytest.MonkeyPatch
):
    driver, (target,) = monitors.driver(name), monitors.folders("saved")
    saving, continues, open_then = anyio.Event(), threading.Event(), list[bool]()

    def keep_late(machine: MicroVm, _dst: Path) -> None:
        anyio.from_thread.run_sync(saving.set)
        assert continues.wait(30)
        places = [Path(f"/proc/self/fd/{file}") for file in (*machine.files.values(), machine.root)]
        open_then.append(all(place.is_symlink() for place in places))

    async def snapshot(machine: Machine) -> None:
        await driver.snapshot(machine, target, keep=True)
        with pytest.raises(MachineLost, match="has ended"):
            await driver.snapshot(machine, target, keep=True)

    async def let_continue(machine: MicroVm) -> None:
        await machine.wait()  # the end of the block below kills it
        continues.set()

    monkeypatch.setattr(sys.modules[type(driver).__module__], "_keep", keep_late)
    async with anyio.create_task_group() as tasks, driver.launch(monitors.spec) as machine:
        assert isinstance(machine, MicroVm)
        tasks.start_soon(snapshot, machine)
        tasks.start_soon(let_continue, machine)
        await saving.wait()
    assert open_then == [True]


async def test_a_machine_runs_on_if_it_cannot_be_saved(name: str, monitors: FakeMonitors):
    driver, (target,) = monitors.driver(name, refuse=SAVING[name]), monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        with pytest.raises(SnapshotFailed, match="it is refused"):
            await driver.snapshot(machine, target, keep=True)
        assert monitors.asked[-1][1:] == RESUMING[name]


@pytest.mark.parametrize(("problem", "reason"), [("refuse", "it is refused"), ("die", "restore")])
async def test_a_machine_that_cannot_be_restored_this_time_leaves_its_snapshot_good(
    name: str, problem: str, reason: str, monitors: FakeMonitors
):
    driver, (target,) = monitors.driver(name, **{problem: LOADING[name]}), monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, target)
    with pytest.raises(LaunchFailed, match=reason):
        async with driver.restore(saved, monitors.spec):
            pytest.fail("it started")


@pytest.mark.parametrize("place", ["scratch_copy", "load_sealed"])
async def test_a_host_without_room_for_a_copy_leaves_its_snapshot_good(
    name: str, place: str, monitors: FakeMonitors, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    driver, (target,) = monitors.driver(name), monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, target)
    with monkeypatch.context() as patched:
        patched.setattr(memory, place, full)
        with pytest.raises(LaunchFailed, match=r"no room for another machine: .*no space left"):
            async with driver.restore(saved, monitors.spec):
                pytest.fail("it started")
    async with driver.restore(saved, monitors.spec):
        pass


async def test_memory_of_another_size_than_the_machines_is_no_good_snapshot(name: str, monitors: FakeMonitors):
    driver, (target,) = monitors.driver(name), monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, target)
    os.truncate(target / SAVED_MEMORY, 1 << 30)
    with pytest.raises(SnapshotFailed, match="memory of 1073741824 bytes"):
        async with driver.restore(saved, monitors.spec):
            pytest.fail("it started")


async def test_a_restored_agent_that_does_not_listen_is_given_up_soon(
    name: str, monitors: FakeMonitors, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine_module, "RESTORED_S", 0.2)
    driver, (target,) = monitors.driver(name, deaf=1_000_000), monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, target)
    with anyio.fail_after(60):
        async with driver.restore(saved, monitors.spec) as machine:
            with pytest.raises(MachineLost, match="no agent listens"):
                await machine.connect()


async def test_a_monitor_that_does_not_answer_is_said_to_be_silent_whatever_it_has_printed(
    name: str, monitors: FakeMonitors
):
    driver = monitors.driver(name, prints="all is well")
    async with driver.launch(monitors.spec) as machine:
        assert isinstance(machine, MicroVm)
        os.kill(machine.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, machine.pid, os.WSTOPPED | os.WNOWAIT)  # all of its threads
        with pytest.raises(MachineLost, match=r"failed: no answer in 0\.2 s; it printed: all is well$"):
            await machine.control.ask(driver.pausing, wait_s=0.2)


async def test_a_snapshot_that_is_gone_cannot_be_restored(name: str, monitors: FakeMonitors):
    with pytest.raises(SnapshotFailed, match="cannot be read"):
        async with monitors.driver(name).restore(Snapshot(name, monitors.folder / "nowhere"), monitors.spec):
            pytest.fail("it started")


async def test_a_snapshot_of_another_cpu_model_is_refused_with_both_models(
    name: str, monitors: FakeMonitors, monkeypatch: pytest.MonkeyPatch
):
    driver, (target,) = monitors.driver(name), monitors.folders("saved")
    monkeypatch.setattr(cpu, "model", lambda: "Old CPU")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, target)
    monkeypatch.setattr(cpu, "model", lambda: "New CPU")
    with pytest.raises(SnapshotFailed, match=r"another model \(Old CPU\), this host has New CPU: build the template"):
        async with driver.restore(saved, monitors.spec):
            pytest.fail("it started")


async def test_a_restored_machine_needs_no_file_of_the_home_but_its_image(name: str, monitors: FakeMonitors):
    driver, (target,) = monitors.driver(name), monitors.folders("saved")
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, target)
    async with driver.restore(saved, monitors.spec) as machine:
        files = machine.files  # type: ignore[attr-defined]
        places = {link: str(Path(f"/proc/self/fd/{file}").readlink()) for link, file in files.items()}
    ours = {link for link, place in places.items() if str(monitors.folder) in place and "(deleted)" not in place}
    assert ours == {"/files/image"}


async def test_a_machine_has_no_network_device(name: str, monitors: FakeMonitors):
    driver, (target,) = monitors.driver(name), monitors.folders("saved")
    assert NetworkMode.NAT not in driver.capabilities.networks
    async with driver.launch(monitors.spec) as machine:
        saved = await driver.snapshot(machine, target)
    async with driver.restore(saved, monitors.spec) as machine:
        files = machine.files  # type: ignore[attr-defined]
        configured = [os.pread(files[link], 1 << 16, 0).decode() for link in files if link.endswith(".json")]
    told = json.dumps(monitors.asked) + "".join(configured)
    assert "/files/disk" in told or name == "firecracker"
    assert not re.search(r'"/network-interfaces|"net"', told)


async def test_more_cpus_than_the_monitor_gives_are_refused_with_what_to_do(name: str, monitors: FakeMonitors):
    driver = monitors.driver(name)
    most = driver.monitor.most_vcpus
    with pytest.raises(LaunchFailed, match=rf"at most {most} CPUs, not {most + 1}: .* or set driver = qemu"):
        async with driver.launch(replace(monitors.spec, vcpus=most + 1)):
            pytest.fail("it started")


def test_a_machine_may_have_a_thread_for_each_cpu(name: str, monitors: FakeMonitors):
    pids = [driver_module.machine_limits(replace(monitors.spec, vcpus=vcpus)).pids for vcpus in (1, 32)]
    assert pids == [1 + probe.THREADS, 32 + probe.THREADS]


def test_saving_a_large_machine_may_take_longer(name: str, monitors: FakeMonitors):
    small, large = (driver_module.save_s(replace(monitors.spec, memory_mb=mb)) for mb in (512, 64 * 1024))
    assert small < 140
    assert large > 64 * 1024 / 60  # MB/s


async def test_no_link_is_followed_to_a_socket_of_the_host(name: str, tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / name))
        listening.listen()
        (tmp_path / "agent.sock").symlink_to(name)
        directory = os.open(tmp_path, os.O_PATH)
        try:
            with pytest.raises(MachineLost):
                await vsock.connect(directory, "agent.sock")
        finally:
            os.close(directory)


async def test_no_link_is_followed_to_a_directory_of_the_host(name: str, monitors: FakeMonitors):
    (hosts,) = monitors.folders("hosts")
    (hosts / "precious").touch()
    async with monitors.driver(name).launch(monitors.spec) as machine:
        (monitors.roots[0] / "link").symlink_to(hosts)
        machine.remove("link", ["precious"])  # type: ignore[attr-defined]
    assert (hosts / "precious").exists()
