"""QEMU microVMs: the driver's facts. Its code is imported when a driver is created."""

from vmm.driver import Driver, DriverConfig
from vmm.types import Capabilities, DriverInfo, Isolation, Need, NetworkMode

INFO = DriverInfo(
    name="qemu",
    title="QEMU",
    capabilities=Capabilities(
        isolation=Isolation.VM,
        snapshot=True,
        serial=True,
        fixed_size=True,
        disk_rate=True,
        networks=frozenset(NetworkMode),
    ),
    needs=(
        Need("qemu-system-x86_64", "qemu-system-x86", "runs sandboxes as virtual machines", "run"),
        Need("mkfs.ext4", "e2fsprogs", "creates the disk a sandbox writes to", "build"),
    ),
    rank_with_kvm=30,
    rank_without_kvm=20,
)


def create(config: DriverConfig) -> Driver:
    """Return a QEMU driver for this host."""
    from vmm.drivers.qemu.driver import QemuDriver  # here, so that reading INFO stays cheap

    return QemuDriver(config)
