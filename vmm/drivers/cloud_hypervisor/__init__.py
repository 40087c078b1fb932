"""Cloud Hypervisor microVMs: the driver's facts. Its code is imported when a driver is created."""

from vmm.driver import Driver, DriverConfig
from vmm.types import Capabilities, DriverInfo, Isolation, Need

INFO = DriverInfo(
    name="cloud-hypervisor",
    title="Cloud Hypervisor",
    capabilities=Capabilities(isolation=Isolation.VM, snapshot=True, fixed_size=True, disk_rate=True),
    needs=(
        Need("lz4", "lz4", "unpacks the guest kernel", "build"),
        Need("mkfs.ext4", "e2fsprogs", "creates the disk a sandbox writes to", "build"),
    ),
    by_hand=True,
    rank_with_kvm=15,
)


def create(config: DriverConfig) -> Driver:
    """Return a Cloud Hypervisor driver for this host."""
    from vmm.drivers.cloud_hypervisor.driver import CloudHypervisorDriver  # here, so that reading INFO stays cheap

    return CloudHypervisorDriver(config)
