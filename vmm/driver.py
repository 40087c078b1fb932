"""The contract between drivers and the code that uses machines.

A driver is a package with `INFO`, its facts, and `create(config)`. `DRIVERS` lists all of them.
"""

import importlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from anyio.abc import ByteStream

from vmm.errors import DriverUnavailable, NetworkUnsupported
from vmm.network.plan import NatConfig
from vmm.types import (
    Accel,
    Capabilities,
    CpuPriority,
    DriverInfo,
    Exit,
    GuestKernel,
    MachineSpec,
    NetworkDevice,
    Probe,
    Snapshot,
    Usage,
)

# Where each driver's package is. `doctor` shows drivers in this order.
DRIVERS = {
    "firecracker": "vmm.drivers.firecracker",
    "cloud-hypervisor": "vmm.drivers.cloud_hypervisor",
    "qemu": "vmm.drivers.qemu",
    "gvisor": "vmm.drivers.gvisor",
    "bubblewrap": "vmm.drivers.bubblewrap",
}


@dataclass(frozen=True, slots=True)
class DriverConfig:
    """What a driver is told about its host."""

    run_dir: Path  # scratch space of running machines
    cache_dir: Path  # for probe results that hold until the host reboots
    kernel: GuestKernel | None = None  # the guest kernel, once it was fetched
    own_kernel: bool = False  # the user chose `kernel`, perhaps to suit this host's KVM
    accel: Accel | None = None  # None: the best one that works
    program: Path | None = None  # what we downloaded for the driver (`DriverInfo.program`), if we did
    chosen: bool = False  # the operator chose `program` with `setup`, so no other one may take its place
    binary: Path | None = None  # the program that the operator chose for the driver; None: the one on the PATH
    nat: NatConfig | None = None  # what machines in mode `nat` may reach; None: no machine gets it


class Machine(Protocol):
    """One running machine. It ends with the context manager that yielded it."""

    @property
    def id(self) -> str: ...

    @property
    def device(self) -> NetworkDevice | None:
        """Return what the agent has to configure of its network device, if the machine has one."""
        ...

    async def connect(self) -> ByteStream:
        """Return the stream to the agent. It can be taken once."""
        ...

    async def pause(self) -> None:
        """Let the machine's processes stand still, so that it uses no CPU. Its clocks run on. Raise MachineLost."""
        ...

    async def resume(self) -> None:
        """Let a paused machine run again. Takes less than a millisecond."""
        ...

    def prioritize(self, priority: CpuPriority) -> None:
        """Set how much CPU the machine gets. Does nothing on hosts without cgroups."""
        ...

    async def usage(self) -> Usage: ...

    async def wait(self) -> Exit:
        """Return how the machine ended, once it has."""
        ...


class Driver(Protocol):
    """A way to run machines."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def probe(self) -> Probe:
        """Return whether the driver works on this host. Only the first call takes time."""
        ...

    def launch(self, spec: MachineSpec) -> AbstractAsyncContextManager[Machine]:
        """Start a machine; raise DriverUnavailable, NetworkUnsupported or LaunchFailed."""
        ...

    async def aclose(self) -> None:
        """Release what the driver holds. Its machines must have ended."""
        ...


@runtime_checkable
class SnapshotDriver(Driver, Protocol):
    """A driver that can save machines and restore copies of them."""

    async def fingerprint(self) -> str:
        """Return what snapshots depend on besides their machine. A snapshot with another fingerprint is stale."""
        ...

    async def snapshot(self, machine: Machine, dst: Path, *, keep: bool = False) -> Snapshot:
        """Save `machine` into the empty directory `dst`. It runs on if `keep`, else it stands still or has ended.

        No bytes may be in flight on the agent's stream: a copy would miss them.
        """
        ...

    def restore(self, snapshot: Snapshot, spec: MachineSpec) -> AbstractAsyncContextManager[Machine]:
        """Start a machine from a snapshot; raise SnapshotFailed as well as what `launch` raises."""
        ...


def check_network(driver: Driver, spec: MachineSpec) -> None:
    """Raise NetworkUnsupported if the driver cannot give a machine its network mode."""
    if spec.network not in driver.capabilities.networks:
        raise NetworkUnsupported(f"driver {driver.name} has no network mode {spec.network}")


def driver_info(name: str) -> DriverInfo:
    """Return the facts of the driver called `name`; raise DriverUnavailable if there is none."""
    info: DriverInfo = _package(name).INFO
    return info


def driver_infos() -> list[DriverInfo]:
    """Return the facts of all drivers."""
    return [driver_info(name) for name in DRIVERS]


def load_driver(name: str, config: DriverConfig) -> Driver:
    """Create the driver called `name`; raise DriverUnavailable if there is none."""
    driver: Driver = _package(name).create(config)
    return driver


def _package(name: str) -> Any:  # noqa: ANN401 - a module
    if name not in DRIVERS:
        raise DriverUnavailable(f"there is no driver called {name!r}", fix=f"choose one of: {', '.join(DRIVERS)}")
    return importlib.import_module(DRIVERS[name])
