"""A driver that the product does not know: bubblewrap's code under another name, with its own facts.

Tests register it in `DRIVERS` to show that a new driver needs nothing but its files and its name.
"""

from vmm.driver import Driver, DriverConfig
from vmm.drivers import bubblewrap
from vmm.drivers.bubblewrap.driver import BubblewrapDriver
from vmm.types import DriverInfo, Need, Program

TOYCTL = Program("Toy Machines", "toy-tools", "usr/bin/toyctl", by_hand="install toyctl on the PATH")
INFO = DriverInfo(
    name="toy",
    title="Toy Machines",
    capabilities=bubblewrap.INFO.capabilities,
    needs=(Need("toyctl", "toy-tools", "runs sandboxes as toys", "run"),),
    program=TOYCTL,
    rank_without_kvm=1,
)


class ToyDriver(BubblewrapDriver):
    """Starts bubblewrap machines."""

    name = INFO.name
    capabilities = INFO.capabilities

    def __init__(self, config: DriverConfig) -> None:
        super().__init__(config)
        self.config = config


def create(config: DriverConfig) -> Driver:
    """Return a toy driver for this host."""
    return ToyDriver(config)
