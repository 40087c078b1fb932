"""Firecracker microVMs: a small monitor, on KVM only."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from vmm import memory
from vmm.drivers.firecracker import INFO, requests
from vmm.microvm.api import Request
from vmm.microvm.driver import MIB, SAVED_DISK, SAVED_MEMORY, SAVED_STATE, MicroVmDriver, read_state, save_s
from vmm.microvm.layout import API_SOCKET, DISK, MEMORY
from vmm.microvm.machine import MicroVm
from vmm.microvm.probe import Monitor, Release
from vmm.types import MachineSpec


class FirecrackerMachine(MicroVm):
    """A running Firecracker process, with what we know of the file that it saves its memory to."""

    complete = False  # the file has all memory, as it was when the machine was restored or last copied
    changes_lost = False  # Firecracker may have forgotten some that are not in the file


class FirecrackerDriver(MicroVmDriver):
    """Starts, saves and restores Firecracker microVMs."""

    monitor = Monitor(
        info=INFO,
        program="firecracker",
        setting="firecracker",
        oldest=(1, 10),  # it describes its devices by ACPI, which Debian's kernel needs, and its snapshots are stable
        release=(
            "https://github.com/firecracker-microvm/firecracker/releases/download/vVERSION/"
            "firecracker-vVERSION-x86_64.tgz and .tgz.sha256.txt"
        ),
        check="with `sha256sum --check firecracker-vVERSION-x86_64.tgz.sha256.txt`",
        unpack=(
            "`tar xzf firecracker-vVERSION-x86_64.tgz`, "
            "`install release-vVERSION-x86_64/firecracker-vVERSION-x86_64 /usr/local/bin/firecracker`"
        ),
        most_vcpus=32,
        hello=Request("GET", "/version"),
        defective=dict.fromkeys(((1, 14, 0), (1, 14, 1)), "damages copies of machines with more than 3 GB"),
    )
    pausing, resuming = requests.PAUSE, requests.RESUME
    machine_type = FirecrackerMachine
    saves_to_files = (requests.NEW_MEMORY, requests.NEW_STATE)  # memory would count against the machine's limit

    def argv(self, program: str) -> Sequence[str]:
        return [program, "--api-sock", f"/{API_SOCKET}", "--id", "machine"]

    def boot(self, spec: MachineSpec) -> Sequence[Request]:
        return requests.boot(spec)

    def try_kernel(self, spec: MachineSpec) -> Sequence[Request]:
        return requests.try_kernel(spec)

    def load(self, release: Release) -> Sequence[Request]:
        return [requests.load(release)]

    def state_files(self, _spec: MachineSpec, state: bytes) -> Mapping[str, bytes]:
        return {requests.STATE: state}

    async def prepare(self, machine: MicroVm) -> None:
        """Copy the memory that a machine was restored from to a file that gets its changes.

        Firecracker saves each change only once. It would leave holes in a new file, but not every file system can tell
        them from pages of zeros.
        """
        assert isinstance(machine, FirecrackerMachine)
        if MEMORY not in machine.files or machine.complete or machine.changes_lost:
            return
        restored_from, new = machine.files[MEMORY], machine.files[requests.NEW_MEMORY]
        try:
            await anyio.to_thread.run_sync(memory.copy_pages, restored_from, new, machine.spec.memory_mb * MIB)
            machine.complete = True
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_clear, machine)

    async def save(self, machine: MicroVm, dst: Path) -> None:
        """Save a machine. Firecracker writes to files of ours: it does not know where snapshots are."""
        assert isinstance(machine, FirecrackerMachine)
        try:
            await _save_memory(machine)
            await anyio.to_thread.run_sync(_keep, machine, dst)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_clear, machine)


async def _save_memory(machine: FirecrackerMachine) -> None:
    """Write what has changed to a file that has the rest already, or all memory if there is no such file."""
    changes_only = machine.complete
    machine.complete, machine.changes_lost = False, True  # until Firecracker says that it has written them
    await machine.control.ask(requests.save(changes_only=changes_only), wait_s=save_s(machine.spec))
    machine.complete, machine.changes_lost = MEMORY in machine.files, False


def _clear(machine: FirecrackerMachine) -> None:
    """Give the disk its space back, but for memory to which the next changes can be added."""
    os.ftruncate(machine.files[requests.NEW_STATE], 0)
    if not machine.complete:
        os.ftruncate(machine.files[requests.NEW_MEMORY], 0)


def _keep(machine: FirecrackerMachine, dst: Path) -> None:
    """Copy what the monitor has written. It may have been taken over, so no size is believed."""
    new, size = machine.files[requests.NEW_MEMORY], machine.spec.memory_mb * MIB
    if (found := os.fstat(new).st_size) != size:
        raise OSError(f"it wrote {found} bytes of memory")
    (dst / SAVED_STATE).write_bytes(read_state(machine.files[requests.NEW_STATE], machine.spec))
    memory.save_sparse(new, dst / SAVED_MEMORY, size)
    memory.save_sparse(machine.files[DISK], dst / SAVED_DISK, machine.spec.disk_mb * MIB)
