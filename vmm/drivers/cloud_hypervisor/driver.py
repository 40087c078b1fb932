"""Cloud Hypervisor microVMs, on KVM only."""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.to_thread

from vmm import memory
from vmm.drivers.cloud_hypervisor import INFO, requests
from vmm.drivers.cloud_hypervisor.state import without_memory
from vmm.microvm.api import Request
from vmm.microvm.driver import MIB, SAVED_DISK, SAVED_MEMORY, SAVED_STATE, MicroVmDriver, read_state, save_s
from vmm.microvm.layout import API_SOCKET, DISK
from vmm.microvm.machine import MicroVm
from vmm.microvm.probe import Monitor, Release
from vmm.types import MachineSpec


class CloudHypervisorDriver(MicroVmDriver):
    """Starts, saves and restores Cloud Hypervisor microVMs."""

    monitor = Monitor(
        info=INFO,
        program="cloud-hypervisor",
        setting="cloud_hypervisor",
        oldest=(40,),
        release=(
            "https://github.com/cloud-hypervisor/cloud-hypervisor/releases/download/vVERSION/cloud-hypervisor-static"
        ),
        check="by comparing `sha256sum cloud-hypervisor-static` with the digest on the release's page",
        unpack="`install cloud-hypervisor-static /usr/local/bin/cloud-hypervisor`",
        most_vcpus=64,  # in a template; it could have more
        hello=requests.HELLO,
        came_later={
            (50, 1): "code chooses the format of its disk: Cloud Hypervisor 50.1 and newer read it as it is",
            (51, 2): "code may take over its monitor by a known defect of its disks, repaired in Cloud Hypervisor 51.2",
            (52,): "code can use the host's nested virtualization, since 50 on AMD only: Cloud Hypervisor 53 hides it",
            (53,): "a fork or pause may lose what code is writing to its disk: Cloud Hypervisor 53 waits for it",
        },
        defective=dict.fromkeys(((52, 0), (52, 0, 0)), "takes twice the memory that a machine uses"),
    )
    pausing, resuming = requests.PAUSE, requests.RESUME
    saves_to_folder = requests.NEW

    def argv(self, program: str) -> Sequence[str]:
        return [program, "--api-socket", f"path=/{API_SOCKET}", "--seccomp", "true"]

    def boot(self, spec: MachineSpec) -> Sequence[Request]:
        return requests.boot(spec)

    def try_kernel(self, spec: MachineSpec) -> Sequence[Request]:
        return requests.try_kernel(spec)

    def load(self, _release: Release) -> Sequence[Request]:
        return requests.load()

    def state_files(self, spec: MachineSpec, state: bytes) -> Mapping[str, bytes]:
        # Not the configuration that was saved: code that took over its monitor could have changed that.
        config = json.dumps(requests.config(spec, restored=True)).encode()
        return {f"{requests.SAVED}/{requests.CONFIG}": config, f"{requests.SAVED}/{requests.STATE}": state}

    async def save(self, machine: MicroVm, dst: Path) -> None:
        """Save a machine. It writes a copy of its memory to its own root directory, for which it gets more memory."""
        with machine.group.widened(machine.spec.memory_mb * MIB):
            try:
                await machine.control.ask(requests.save(), wait_s=save_s(machine.spec))
                await anyio.to_thread.run_sync(_keep, machine, dst)
            finally:  # it takes memory, and the next snapshot would not replace it
                names = requests.CONFIG, requests.STATE, requests.NEW_MEMORY
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(machine.remove, requests.NEW, names)


def _keep(machine: MicroVm, dst: Path) -> None:
    """Copy what the monitor has written. It may have been taken over, so nothing there is followed or believed."""
    size = machine.spec.memory_mb * MIB
    with machine.folder(requests.NEW) as new:
        with _opened(new, requests.STATE) as file:
            (dst / SAVED_STATE).write_bytes(without_memory(read_state(file.fileno(), machine.spec), size))
        with _opened(new, requests.NEW_MEMORY) as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                raise OSError(f"it wrote {found} bytes of memory")
            memory.save_sparse(file.fileno(), dst / SAVED_MEMORY, size)
    memory.save_sparse(machine.files[DISK], dst / SAVED_DISK, machine.spec.disk_mb * MIB)


def _opened(folder: int, name: str) -> BinaryIO:
    file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"its {name} is no file")
    return os.fdopen(file, "rb")
