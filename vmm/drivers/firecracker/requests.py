"""What Firecracker is asked to do: pure functions from a machine's spec to requests.

Inside its namespaces every file has a fixed name (see `FILES`), so a snapshot can be restored in any machine.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from vmm.types import GuestKernel, MachineSpec
from vmm.vsock import CID, PORT

# Links to open files, in the root directory of the machine's namespaces.
IMAGE, DISK, KERNEL, INITRAMFS = "/files/image", "/files/disk", "/files/kernel", "/files/initramfs"
MEMORY, STATE = "/files/memory", "/files/state"  # of the snapshot that it is restored from
NEW_MEMORY, NEW_STATE = "/files/new-memory", "/files/new-state"  # of one that is taken
# In that root directory, which the host can reach, too. The host's own has no such files.
API_SOCKET, AGENT_SOCKET = "mcp-sandbox-api", "mcp-sandbox-agent"

# A reboot ends the machine. One tenant, thrown away after use: see vmm/drivers/qemu/command.py.
KERNEL_ARGS = (
    "quiet reboot=k panic=-1 8250.nr_uarts=0 lsm=capability audit=0 psi=0 nowatchdog init_on_alloc=0 "
    f"transparent_hugepage=never mcp_sandbox.vsock={PORT}"
)
Request = tuple[str, dict[str, Any]]


def boot(spec: MachineSpec) -> list[Request]:
    """Return the requests that configure and start a new machine."""
    return [
        ("/machine-config", {"vcpu_count": spec.vcpus, "mem_size_mib": spec.memory_mb}),
        ("/boot-source", {"kernel_image_path": KERNEL, "initrd_path": INITRAMFS, "boot_args": KERNEL_ARGS}),
        ("/drives/image", _drive("image", IMAGE, read_only=True)),
        ("/drives/disk", _drive("disk", DISK, read_only=False)),
        ("/vsock", {"guest_cid": CID, "uds_path": f"/{AGENT_SOCKET}"}),
        ("/entropy", {}),
        ("/actions", {"action_type": "InstanceStart"}),
    ]


def save(*, changes_only: bool) -> Request:
    """Return the request that saves a machine that stands still: all memory, or what changed since the last time."""
    kind = "Diff" if changes_only else "Full"
    return "/snapshot/create", {"snapshot_type": kind, "snapshot_path": NEW_STATE, "mem_file_path": NEW_MEMORY}


def load() -> Request:
    """Return the request that continues a saved machine.

    Its memory is mapped copy-on-write. Firecracker remembers what changes, so that a copy of the machine is quick, and
    does not bring all of its memory in.
    """
    backend = {"backend_type": "File", "backend_path": MEMORY}
    tracking = {"enable_diff_snapshots": True}  # its name since 1.0; newer versions still take it
    return "/snapshot/load", {"snapshot_path": STATE, "mem_backend": backend, "resume_vm": True, **tracking}


def recipe() -> str:
    """Return a hash of the machines that this module describes: a snapshot of another kind cannot be restored."""
    nowhere = Path("/")
    spec = MachineSpec("machine", nowhere, GuestKernel(nowhere, nowhere), memory_mb=1, vcpus=1, disk_mb=1)
    return hashlib.sha256(json.dumps(boot(spec)).encode()).hexdigest()[:16]


def _drive(name: str, path: str, *, read_only: bool) -> dict[str, Any]:
    return {"drive_id": name, "path_on_host": path, "is_root_device": False, "is_read_only": read_only}
