"""Whether a monitor can run machines on this host, found by running it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vmm import probe as host
from vmm.driver import DriverConfig
from vmm.limits import Hierarchy, rlimit_argv
from vmm.microvm.api import Request
from vmm.namespaces import ROOT_MB, in_namespaces
from vmm.probe import KVM_DEVICE, missing_protections, version_output
from vmm.process import find_tool
from vmm.types import GUEST_KERNEL, Accel, DriverInfo, Probe

Release = tuple[int, ...]
THREADS = 64  # of a monitor: one for each CPU, one or two for each device, and a few more


@dataclass(frozen=True, slots=True)
class Monitor:
    """The facts of a monitor."""

    info: DriverInfo
    program: str
    setting: str  # that names another program
    oldest: Release  # version that works
    release: str  # the address of its official releases
    check: str  # how to check what was downloaded from there
    hello: Request  # which it always answers
    came_later: Mapping[Release, str] = field(default_factory=dict)  # what releases before these do not protect from

    @property
    def install(self) -> str:
        """Return what the operator has to do: no package has the program, and we download none."""
        return (
            f"download it from {self.release} (VERSION: the newest), check it {self.check}, "
            f"and put it on the PATH as {self.program}, or set {self.setting} to its path"
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """A monitor of this host."""

    binary: str
    version: str
    release: Release  # the same as numbers, to compare


async def probe(monitor: Monitor, config: DriverConfig, hierarchy: Hierarchy) -> tuple[Probe, Engine | None]:
    """Return whether a monitor can run machines on this host, and which one."""
    title, install = monitor.info.title, monitor.install
    binary = str(config.binary) if config.binary else find_tool(monitor.program)
    if binary is None:
        return Probe(False, f"{monitor.program} is not installed", install), None
    printed = await version_output(binary, "--version")
    found = re.search(rf"^{monitor.program} v(\d+(?:\.\d+)*)", printed, re.IGNORECASE | re.MULTILINE)
    if found is None:
        return Probe(False, f"{binary} does not say its version", install), None
    version, numbers = f"{title} {found[1]}", tuple(map(int, found[1].split(".")))
    if numbers < monitor.oldest:
        oldest = ".".join(map(str, monitor.oldest))
        return Probe(False, f"{version} is too old: {oldest} is the oldest that works", install, version=version), None
    if config.accel is Accel.TCG:
        return Probe(False, f"accel = tcg, and {title} needs KVM", version=version), None
    kvm = await host.kvm(config.cache_dir, own_kernel=config.own_kernel)
    if not kvm.usable:
        return Probe(False, kvm.reason, kvm.fix, version=version), None
    unprotected = [sentence for since, sentence in monitor.came_later.items() if numbers < since]
    verdict = Probe(True, kvm.reason, None, Accel.KVM, version, (*missing_protections(hierarchy), *unprotected))
    return verdict if config.kernel else replace(verdict, lacks=GUEST_KERNEL), Engine(binary, version, numbers)


def in_machine(argv: Sequence[str], files: Mapping[str, int], folder: str | None, folder_mb: int) -> list[str]:
    """Return `argv` in new namespaces, without any capability, where `files` have fixed names.

    If there is a `folder`, it can write `folder_mb` to it.
    """
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    return in_namespaces(
        [*powerless, *argv],
        programs=True,
        devices=[str(KVM_DEVICE)],
        folders=[folder] if folder else [],
        files=files,
        limits=rlimit_argv(processes=THREADS),
        root_mb=ROOT_MB + (folder_mb if folder else 0),
    )
