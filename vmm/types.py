"""The nouns of this room: what a machine is made from, and what is known about it."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal


class Isolation(StrEnum):
    """What stands between the code and the host, strongest first."""

    VM = "vm"  # a kernel of its own behind a virtual machine monitor
    KERNEL = "kernel"  # an application kernel between the code and the host's kernel
    NAMESPACE = "namespace"  # the host's kernel, seen through namespaces

    def at_least(self, other: "Isolation") -> bool:
        """Whether this is as strong as `other`, or stronger."""
        strongest_first = list(Isolation)
        return strongest_first.index(self) <= strongest_first.index(other)


class Accel(StrEnum):
    """How a virtual machine's CPU is run."""

    KVM = "kvm"
    TCG = "tcg"  # emulation: works everywhere, many times slower


class NetworkMode(StrEnum):
    """How a machine reaches the network. The lease decides it: one snapshot serves all modes."""

    NONE = "none"  # no device, no streams
    PROXY = "proxy"  # streams to a proxy on the host, no device
    NAT = "nat"  # a device in a network namespace of its own, behind the host's address


class Download(StrEnum):
    """What we can fetch for a driver without root, by the name that people read."""

    KERNEL = "guest kernel"
    RUNSC = "gVisor"


@dataclass(frozen=True, slots=True)
class Need:
    """A program or file of the host that a driver or a build uses."""

    what: str  # a program on the PATH, or the path of a file
    package: str | None  # the Debian package that contains it, if any
    purpose: str
    when: Literal["run", "build"]  # every sandbox needs it, or only template builds do


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """A Linux kernel and the first files it sees."""

    vmlinuz: Path
    initramfs: Path


@dataclass(frozen=True, slots=True)
class GuestCode:
    """The agent for machines that boot no kernel: they unpack it when they start."""

    archive: Path  # a tar file


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """All that a driver needs to start one machine."""

    id: str
    root: Path  # read-only root file system, shared by all machines of a template: what `Capabilities.root` names
    boot: GuestKernel | GuestCode  # what `Capabilities.boots_kernel` says
    memory_mb: int
    vcpus: int
    disk_mb: int  # room for what the machine writes
    network: NetworkMode = NetworkMode.NONE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A machine frozen on disk: any number of machines can be restored from it, all at once."""

    driver: str
    path: Path


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a driver can do, read before work starts."""

    isolation: Isolation
    snapshot: bool
    root: Literal["image", "tree"] = "image"  # one erofs file, or a directory
    networks: frozenset[NetworkMode] = frozenset({NetworkMode.NONE})

    @property
    def boots_kernel(self) -> bool:
        """Whether machines start with a Linux kernel of their own rather than with the agent's code."""
        return self.isolation is Isolation.VM


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """What is known about a driver before anything is imported, probed or started."""

    name: str
    title: str  # the name as its makers write it
    capabilities: Capabilities
    needs: tuple[Need, ...] = ()
    fetches: Download | None = None
    # The order in which `auto` tries drivers, lowest first. None: `auto` does not try this one.
    rank_with_kvm: int | None = None
    rank_without_kvm: int | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """A driver's verdict on this host, from something that really ran."""

    usable: bool
    reason: str
    fix: str | None = None  # the command or step that would improve the verdict
    accel: Accel | None = None
    version: str | None = None
    limits: tuple[str, ...] = ()  # protections that are not in force here
    lacks: Download | None = None  # what to fetch before probing again


@dataclass(frozen=True, slots=True)
class Usage:
    """What a machine takes from the host."""

    memory_bytes: int  # proportional set size: shared pages are divided by their users
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
    """Ceilings the host puts on a machine, whatever runs inside."""

    memory_bytes: int | None = None  # these three hold for all of its processes together
    cpus: float = math.inf
    pids: int | None = None
    file_bytes: int | None = None  # no file it writes becomes larger
    address_space_bytes: int | None = (
        None  # of a process, where nothing holds them all; not for those that reserve much
    )
    alone: bool = False  # its user, or user namespace, has no other processes, so that they can be counted
