"""gVisor sandboxes: the driver's facts. Its code is imported when a driver is created."""

from vmm.driver import Driver, DriverConfig
from vmm.types import Capabilities, DriverInfo, Isolation, NetworkMode, Program

RUNSC = Program(
    title="gVisor",
    package="runsc",
    path="usr/bin/runsc",
    by_hand="install runsc of July 2024 or newer on the PATH, or run mcp-sandbox setup --runsc",
    too_old=frozenset({"bullseye", "bookworm"}),
    first_good="trixie",
)
INFO = DriverInfo(
    name="gvisor",
    title="gVisor",
    capabilities=Capabilities(isolation=Isolation.KERNEL, snapshot=True, networks=frozenset(NetworkMode)),
    program=RUNSC,  # distributions often package a release that is too old
    rank_without_kvm=10,
)


def create(config: DriverConfig) -> Driver:
    """Return a gVisor driver for this host."""
    from vmm.drivers.gvisor.driver import GvisorDriver  # here, so that reading INFO stays cheap

    return GvisorDriver(config)
