"""Whether Firecracker can run machines on this host, found by running it."""

import re
from dataclasses import dataclass, replace

from vmm import probe as host
from vmm.driver import DriverConfig
from vmm.drivers.firecracker import INFO
from vmm.limits import Hierarchy, rlimit_argv
from vmm.namespaces import in_namespaces
from vmm.probe import KVM_DEVICE, missing_protections, version_output
from vmm.process import find_tool
from vmm.types import GUEST_KERNEL, Accel, Probe

PROGRAM = "firecracker"
OLDEST = (1, 10)  # it describes its devices by ACPI, which Debian's kernel needs, and its snapshots are stable
THREADS = 64  # of Firecracker: one for each CPU, and a few more
INSTALL = (
    "download firecracker-vVERSION-x86_64.tgz and its .sha256.txt from the releases of firecracker-microvm/firecracker "
    "on GitHub, check it with sha256sum --check, and put the program firecracker on the PATH"
)


@dataclass(frozen=True, slots=True)
class Engine:
    """A Firecracker of this host."""

    binary: str
    version: str


async def probe(config: DriverConfig, hierarchy: Hierarchy) -> tuple[Probe, Engine | None]:
    """Return whether Firecracker can run machines on this host, and which one."""
    binary = find_tool(PROGRAM)
    if binary is None:
        return Probe(usable=False, reason=f"{PROGRAM} is not installed", fix=INSTALL), None
    printed = await version_output(binary, "--version")
    found = re.search(r"Firecracker v(\d+)\.(\d+)(\S*)", printed)
    if found is None:
        return Probe(usable=False, reason=f"{binary} does not say its version", fix=INSTALL), None
    version = f"{INFO.title} {found[1]}.{found[2]}{found[3]}"
    if (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Probe(False, f"{version} is too old: {oldest} is the oldest that works", INSTALL, version=version), None
    if config.accel is Accel.TCG:
        return Probe(False, "accel = tcg, and Firecracker needs KVM", version=version), None
    kvm = await host.kvm(config.cache_dir, own_kernel=config.own_kernel)
    if not kvm.usable:
        return Probe(False, kvm.reason, kvm.fix, version=version), None
    verdict = Probe(True, kvm.reason, None, Accel.KVM, version, missing_protections(hierarchy))
    engine = Engine(binary, version)
    return verdict if config.kernel else replace(verdict, lacks=GUEST_KERNEL), engine


def in_machine(argv: list[str], files: dict[str, int]) -> list[str]:
    """Return `argv` in new namespaces, without any capability, where `files` have fixed names."""
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    limits = rlimit_argv(processes=THREADS)
    return in_namespaces([*powerless, *argv], programs=True, devices=[str(KVM_DEVICE)], files=files, limits=limits)
