"""What machines are made from, and what is known about them and their drivers."""

import math
from dataclasses import dataclass
from enum import Enum, StrEnum
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Literal

# What a machine may take from its host besides its own memory: the monitor or the application kernel, the agent.
OVERHEAD_MB = 150
# A machine with many busy processes uses up its quota on all CPUs at once, and others wait for that long. So the period
# is much shorter than the kernel's default of 100 ms.
CPU_PERIOD_US = 10_000


class Isolation(StrEnum):
    """What separates a machine's code from the host, strongest first."""

    VM = "vm"  # a guest kernel behind a virtual machine monitor
    KERNEL = "kernel"  # an application kernel in front of the host's kernel
    NAMESPACE = "namespace"  # namespaces on the host's kernel

    def at_least(self, other: "Isolation") -> bool:
        """Return whether this level is at least as strong as `other`."""
        strongest_first = list(Isolation)
        return strongest_first.index(self) <= strongest_first.index(other)


class Accel(StrEnum):
    """What runs a virtual machine's CPU."""

    KVM = "kvm"
    TCG = "tcg"  # QEMU's emulator: works everywhere, many times slower


class NetworkMode(StrEnum):
    """How a machine reaches the network. The lease decides it: one snapshot serves all modes."""

    NONE = "none"  # no device, no streams
    PROXY = "proxy"  # streams to a proxy on the host, no device
    NAT = "nat"  # a device in a network namespace of its own, behind the host's address


@dataclass(frozen=True, slots=True)
class NetworkDevice:
    """What is left to configure in a machine that has a network device."""

    resolvers: tuple[IPv4Address, ...]  # name servers
    address: IPv4Interface | None = None  # None: the driver has configured the device
    gateway: IPv4Address | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A program of a Debian package that we download beside the system's own, which may be missing or too old."""

    title: str  # the name that people read
    package: str
    path: str  # in the package
    by_hand: str  # what to do on hosts where it cannot be downloaded
    too_old: frozenset[str] = frozenset()  # Debian suites whose package is too old
    first_good: str = ""  # the suite to take it from instead

    def __str__(self) -> str:
        return self.title


GUEST_KERNEL: Literal["guest kernel"] = "guest kernel"  # the Linux that all virtual machines boot
Download = Program | Literal["guest kernel"]  # what we can fetch for a driver without root


@dataclass(frozen=True, slots=True)
class Need:
    """A program or file of the host that a driver or a build uses."""

    what: str  # a program on the PATH, or the path of a file
    package: str | None  # the Debian package that contains it, if any
    purpose: str
    when: Literal["run", "build"]  # every sandbox needs it, or only template builds do


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """A Linux kernel and its initramfs."""

    vmlinuz: Path
    initramfs: Path


@dataclass(frozen=True, slots=True)
class GuestCode:
    """The agent's code, for machines that boot no kernel and unpack it when they start."""

    archive: Path  # a tar file


@dataclass(frozen=True, slots=True)
class DiskRate:
    """How fast a machine may use each of its disks, reading and writing together. None: as fast as it can."""

    mb_per_s: int | None = None
    iops: int | None = None  # requests in a second

    def __bool__(self) -> bool:
        return self != DiskRate()

    @property
    def bytes_per_s(self) -> int | None:
        """Return the first limit in bytes."""
        return None if self.mb_per_s is None else self.mb_per_s * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """Everything a driver needs to start one machine."""

    id: str
    root: Path  # the read-only root file system: an image or a tree, see `Capabilities.root`
    boot: GuestKernel | GuestCode  # see `Capabilities.boots_kernel`
    memory_mb: int
    vcpus: int
    disk_mb: int  # for files that the machine writes
    network: NetworkMode = NetworkMode.NONE
    disk_rate: DiskRate = DiskRate()

    @property
    def host_bytes(self) -> int:
        """Return how much of the host's memory the machine may take, files that it keeps in memory included."""
        return (self.memory_mb + OVERHEAD_MB) * 1024 * 1024


class CpuPriority(Enum):
    """How much CPU a machine gets when others want it, too."""

    STARTING = "starting"  # no code has run in it yet: one CPU more, for the monitor that restores it
    INTERACTIVE = "interactive"  # a caller waits for a short answer: one CPU more, for what runs beside the code
    BATCH = "batch"  # it has been busy for a while, so short answers of other machines come first
    UNUSED = "unused"  # no caller uses it: it gets little, even if nobody else wants it


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A machine's state on disk. Any number of machines can be restored from it."""

    driver: str
    path: Path


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a driver's machines are and can do."""

    isolation: Isolation
    snapshot: bool
    root: Literal["image", "tree"] = "image"  # one erofs file, or a directory
    serial: bool = False  # the agent's stream is a serial port, where bytes of an earlier conversation may wait
    fixed_size: bool = False  # a snapshot is only restored with the memory and CPUs that it was taken with
    disk_rate: bool = False  # `MachineSpec.disk_rate` is enforced
    # A proxy needs no device: its streams travel over the agent channel, which every driver has.
    networks: frozenset[NetworkMode] = frozenset({NetworkMode.NONE, NetworkMode.PROXY})

    @property
    def boots_kernel(self) -> bool:
        """Return whether machines boot a Linux kernel; others start with the agent's code."""
        return self.isolation is Isolation.VM


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """The facts of a driver, readable without importing its code or probing the host."""

    name: str
    title: str  # the name as its makers write it
    capabilities: Capabilities
    needs: tuple[Need, ...] = ()
    program: Program | None = None  # what to download for it; a guest kernel follows from `capabilities`
    by_hand: bool = False  # no package has its program: the operator installs it, or `auto` goes on to the next driver
    # The order in which `auto` tries drivers, lowest first. None: `auto` does not try this one.
    rank_with_kvm: int | None = None
    rank_without_kvm: int | None = None

    @property
    def downloads(self) -> bool:
        """Return whether something may have to be downloaded for the driver."""
        return self.program is not None or self.capabilities.boots_kernel


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a driver works on this host, found by running something with it."""

    usable: bool
    reason: str
    fix: str | None = None  # a command or step that would make it usable, or better
    accel: Accel | None = None
    version: str | None = None
    missing_protections: tuple[str, ...] = ()  # one sentence each
    lacks: Download | None = None  # what to fetch before probing again
    program: Path | None = None  # what runs machines, if the driver says it
    features: tuple[str, ...] = ()  # options that not every release of the program has, and that the driver uses


@dataclass(frozen=True, slots=True)
class Usage:
    """What a machine uses of the host."""

    memory_bytes: int  # proportional set size: each process counts its share of a shared page
    private_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Exit:
    """How a machine's process ended."""

    code: int | None = None
    signal: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        how = f"signal {self.signal}" if self.signal else f"status {self.code}"
        return f"{how}: {self.detail}" if self.detail else how


@dataclass(frozen=True, slots=True)
class Limits:
    """What the host lets a machine use, whatever runs inside."""

    memory_bytes: int | None = None  # this, cpus and pids limit the machine as a whole, with a cgroup
    cpus: float = math.inf
    pids: int | None = None
    file_bytes: int | None = None  # the largest file that a process may write
    data_bytes: int | None = None  # private memory that a process may write to, on hosts without cgroups
    own_user: bool = False  # no other machine runs as its user or in its user namespace, so RLIMIT_NPROC can count
