"""The contract between machines and everyone who uses them.

A driver is one module in `vmm.drivers`, imported when it is asked for by name. It exposes `create(config)`.
"""

import importlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from anyio.abc import ByteStream

from vmm.errors import DriverUnavailable
from vmm.types import Accel, Capabilities, Exit, GuestKernel, MachineSpec, Probe, Snapshot, Usage

DRIVER_NAMES = ("qemu", "gvisor", "bubblewrap")  # the ones people can choose, in the order `doctor` shows them


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


def load_driver(name: str, config: DriverConfig) -> Driver:
    """The driver called `name`, imported now."""
    if name not in DRIVER_NAMES:
        known = ", ".join(DRIVER_NAMES)
        raise DriverUnavailable(f"there is no driver called {name!r}", fix=f"choose one of: {known}")
    driver: Driver = importlib.import_module(f"vmm.drivers.{name.replace('-', '_')}").create(config)
    return driver
