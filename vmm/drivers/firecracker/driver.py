"""Firecracker microVMs: a small monitor, on KVM only."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio.to_thread

from vmm import memory
from vmm.drivers.firecracker import INFO, requests
from vmm.errors import SnapshotFailed
from vmm.microvm.api import Request
from vmm.microvm.driver import SAVE_S, SAVED_DISK, SAVED_MEMORY, SAVED_STATE, MicroVmDriver
from vmm.microvm.layout import API_SOCKET, DISK, MEMORY
from vmm.microvm.machine import MicroVm
from vmm.microvm.probe import Monitor, Release
from vmm.types import MachineSpec


class FirecrackerMachine(MicroVm):
    """A running Firecracker process. It saves each change to its memory only once, so we keep all of them."""

    changes: int | None = None  # a file of those to the memory that the machine was restored from
    changes_lost = False  # Firecracker has saved some that are in no file

    def close(self) -> None:
        if self.changes is not None:
            os.close(self.changes)


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
        hello=Request("GET", "/version"),
    )
    pausing, resuming = requests.PAUSE, requests.RESUME
    machine_type = FirecrackerMachine
    saves_to_files = (requests.NEW_MEMORY, requests.NEW_STATE)  # memory would count against the machine's limit

    def argv(self, program: str) -> Sequence[str]:
        return [program, "--api-sock", f"/{API_SOCKET}", "--id", "machine"]

    def boot(self, spec: MachineSpec) -> Sequence[Request]:
        return requests.boot(spec)

    def load(self, release: Release) -> Sequence[Request]:
        return [requests.load(release)]

    def state_files(self, _spec: MachineSpec, state: bytes) -> Mapping[str, bytes]:
        return {requests.STATE: state}

    async def save(self, machine: MicroVm, dst: Path) -> None:
        """Save a machine. Firecracker writes to files of ours: it does not know where snapshots are."""
        assert isinstance(machine, FirecrackerMachine)
        if machine.changes_lost:
            reason = "an earlier copy could not be written"
            raise SnapshotFailed(f"machine {machine.id} cannot be copied any more: {reason}")
        if machine.changes is None:
            machine.changes = memory.scratch_file(self.run_dir(), 0)
        base = machine.files.get(MEMORY)
        try:
            await machine.control.ask(requests.save(changes_only=base is not None), wait_s=SAVE_S)
            if base is not None:
                machine.changes_lost = True  # until they are kept
                new = machine.files[requests.NEW_MEMORY]
                await anyio.to_thread.run_sync(memory.copy_data, new, machine.changes)
                machine.changes_lost = False
            await anyio.to_thread.run_sync(_keep, machine, dst)
        finally:
            for name in (requests.NEW_MEMORY, requests.NEW_STATE):
                os.ftruncate(machine.files[name], 0)


def _keep(machine: FirecrackerMachine, dst: Path) -> None:
    base = machine.files.get(MEMORY)
    memory.save_sparse(machine.files[requests.NEW_MEMORY] if base is None else base, dst / SAVED_MEMORY)
    if base is not None and machine.changes is not None:
        with (dst / SAVED_MEMORY).open("r+b") as target:
            memory.copy_data(machine.changes, target.fileno())
    memory.save_sparse(machine.files[requests.NEW_STATE], dst / SAVED_STATE)
    memory.save_sparse(machine.files[DISK], dst / SAVED_DISK)
