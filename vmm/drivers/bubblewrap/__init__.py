"""Bubblewrap namespaces: the driver's facts. Its code is imported when a driver is created."""

from vmm.driver import Driver, DriverConfig
from vmm.types import Capabilities, DriverInfo, Isolation, Need, NetworkMode

# No rank: `auto` never chooses the weakest isolation.
INFO = DriverInfo(
    name="bubblewrap",
    title="bubblewrap",
    capabilities=Capabilities(
        isolation=Isolation.NAMESPACE, snapshot=False, root="tree", networks=frozenset(NetworkMode)
    ),
    needs=(Need("bwrap", "bubblewrap", "runs sandboxes in namespaces", "run"),),
)


def create(config: DriverConfig) -> Driver:
    """Return a bubblewrap driver for this host."""
    from vmm.drivers.bubblewrap.driver import BubblewrapDriver  # here, so that reading INFO stays cheap

    return BubblewrapDriver(config)
