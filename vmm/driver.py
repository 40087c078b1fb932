"""The contract between drivers and the code that uses machines.

A driver is a package with `INFO`, its facts, and `create(config)`. `DRIVERS` lists all of them.
"""

import importlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from anyio.abc import ByteStream

from vmm.errors import DriverUnavailable
from vmm.types import Accel, Capabilities, DriverInfo, Exit, GuestKernel, MachineSpec, Probe, Snapshot, Usage

# Where each driver's package is. `doctor` shows drivers in this order.
DRIVERS = {
    "qemu": "vmm.drivers.qemu",
    "gvisor": "vmm.drivers.gvisor",
    "bubblewrap": "vmm.drivers.bubblewrap",
}


@dataclass(frozen=True, slots=True)
class DriverConfig:
    """What a driver may know about the host it serves."""

    run_dir: Path  # scratch of running machines; a driver removes what it puts there
    cache_dir: Path  # verdicts worth keeping until the host reboots
    kernel: GuestKernel | None = None  # lets a probe boot something real
    own_kernel: bool = False  # `kernel` was named by the user, who may have made it for this host's KVM
    accel: Accel | None = None  # None: the driver finds out
    runsc: Path | None = None  # a gVisor of our own, where the system has none or an old one


class Machine(Protocol):
    """One running machine. It ends with the context manager that gave it."""

    @property
    def id(self) -> str: ...

    async def connect(self) -> ByteStream:
        """The agent channel. It can be taken once."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def usage(self) -> Usage: ...

    async def wait(self) -> Exit:
        """Return when the machine has ended by itself or by force."""
        ...


class Driver(Protocol):
    """A way to run machines."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def probe(self) -> Probe: ...

    def launch(self, spec: MachineSpec) -> AbstractAsyncContextManager[Machine]: ...

    async def aclose(self) -> None:
        """Give back what the driver itself holds. Its machines must have ended."""
        ...


@runtime_checkable
class SnapshotDriver(Driver, Protocol):
    """A driver that can freeze a machine and start copies of it."""

    async def fingerprint(self) -> str:
        """What a snapshot depends on besides its machine: a snapshot taken under another one is stale."""
        ...

    async def snapshot(self, machine: Machine, dst: Path, *, keep: bool = False) -> Snapshot:
        """Freeze `machine` into the empty directory `dst`. It goes on if it is to be kept, else it has ended or stands.

        Nothing may be on its way in the agent channel: a copy would miss it.
        """
        ...

    def restore(self, snapshot: Snapshot, spec: MachineSpec) -> AbstractAsyncContextManager[Machine]: ...


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
