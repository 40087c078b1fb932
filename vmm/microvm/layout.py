"""What every microVM looks like, to its monitor and to its kernel."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from vmm.types import DiskRate, GuestKernel, MachineSpec
from vmm.vsock import PORT

# Names in a machine's root directory. They are fixed, because a snapshot records the paths of disks and sockets. Those
# in /files are links to open files.
IMAGE, DISK, KERNEL, INITRAMFS = "/files/image", "/files/disk", "/files/kernel", "/files/initramfs"
MEMORY = "/files/memory"  # of the snapshot that the machine is restored from
# The host reaches these two from outside. Its own root directory has no such files.
API_SOCKET, AGENT_SOCKET = "mcp-sandbox-api", "mcp-sandbox-agent"

# A reboot ends the machine. One tenant, thrown away after use: see vmm/drivers/qemu/command.py.
KERNEL_ARGS = (
    "quiet reboot=k panic=-1 8250.nr_uarts=0 lsm=capability audit=0 psi=0 nowatchdog init_on_alloc=0 "
    f"transparent_hugepage=never mcp_sandbox.vsock={PORT}"
)
# Of a machine that only finds its vsock, prints a word on its console, and ends.
PROBE_ARGS = "console=ttyS0 quiet reboot=k panic=-1 mcp_sandbox.probe=vsock"

REFILL_MS = 1000  # a machine may use what it is allowed in a second at once, after it has used nothing for as long


def buckets(rate: DiskRate) -> dict[str, dict[str, int]]:
    """Return the limits on a disk as both monitors take them."""
    sizes = {"bandwidth": rate.bytes_per_s, "ops": rate.iops}
    return {name: {"size": size, "refill_time": REFILL_MS} for name, size in sizes.items() if size is not None}


def recipe(describe: Callable[[MachineSpec], object]) -> str:
    """Return a hash of the machines that `describe` describes: a snapshot of another kind cannot be restored."""
    nowhere = Path("/")
    spec = MachineSpec("machine", nowhere, GuestKernel(nowhere, nowhere), memory_mb=1, vcpus=1, disk_mb=1)
    return hashlib.sha256(json.dumps(describe(spec)).encode()).hexdigest()[:16]
