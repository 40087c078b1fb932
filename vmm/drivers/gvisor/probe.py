"""Whether gVisor can run machines on this host, with which binary and platform, found by running one."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from vmm.driver import DriverConfig
from vmm.drivers.gvisor import OLDEST, RUNSC, command
from vmm.errors import Untrusted
from vmm.limits import Hierarchy
from vmm.memory import sealed_bytes
from vmm.probe import missing_protections, namespace_advice, own_user, privileges, version_output
from vmm.process import Confinement, find_tool, spawn
from vmm.trust import open_trusted
from vmm.types import Probe
from vmm.verdicts import Verdict, Verdicts

DEADLINE_S = 15.0  # it takes 0.2 s
# How gVisor intercepts system calls, best first. `kvm` needs working hardware virtualization.
PLATFORMS = ("systrap", "kvm", "ptrace")
RELEASE = "gvisor-release"  # the question: the answer saves starting the program
SETUP = "mcp-sandbox setup --driver gvisor"


@dataclass(frozen=True, slots=True)
class Engine:
    """A gVisor that works on this host."""

    binary: Path
    version: str
    platform: str


async def probe(config: DriverConfig, hierarchy: Hierarchy) -> tuple[Probe, Engine | None]:
    """Return whether gVisor can run machines on this host, and the engine that does."""
    found, reason = await find_binary(config)
    if found is None:
        fix = SETUP if find_tool("apt-get") else RUNSC.by_hand
        lacks = RUNSC if config.program is None else None
        return Probe(usable=False, reason=reason, fix=fix, lacks=lacks), None
    binary, version = found
    missing = missing_protections(hierarchy)
    troubles = []
    for platform in PLATFORMS:
        trouble = await _trouble(config, binary, platform)
        if trouble is None:
            verdict = Probe(True, f"a program ran in gVisor ({platform})", None, None, version, missing)
            return verdict, Engine(binary, version, platform)
        troubles.append(f"{platform}: {trouble}")
    reason = f"no program ran in gVisor: {'; '.join(troubles)}"
    return Probe(False, reason, namespace_advice(), None, version, missing), None


async def find_binary(config: DriverConfig) -> tuple[tuple[Path, str] | None, str]:
    """Return the first gVisor that is new enough, and its version; or None and the reason."""
    system = find_tool("runsc")
    reason = "runsc is not installed"
    for binary in filter(None, (config.program, Path(system) if system else None)):
        try:
            release = await release_of(config, binary)
        except Untrusted as error:  # it is in our home
            return None, str(error)
        if release >= OLDEST:
            return (binary, f"runsc {release}"), ""
        needed = f"is release {release}; checkpoints need {OLDEST} or newer"
        reason = f"{binary} {needed if release else 'does not run'}"
    return None, reason


async def release_of(config: DriverConfig, binary: Path) -> int:
    """Return the release date of a gVisor as a number such as 20240729; 0 if it is unknown. Raise Untrusted."""
    with opened_binary(config, binary) as program:
        verdicts, details = Verdicts(config.cache_dir), {"binary": identity(binary, os.fstat(program))}
        known = verdicts.get(RELEASE, **details)
        if known is not None:
            return release_in(known.reason)
        release = release_in(await version_output(f"/proc/self/fd/{program}", "--version", pass_fds=[program]))
        if release:
            verdicts.keep(RELEASE, Verdict(True, str(release)), **details)
        return release


def identity(binary: Path, status: os.stat_result) -> list[object]:
    """Return what tells a program from the one that was probed before."""
    return [str(binary), status.st_size, status.st_mtime_ns]


@contextmanager
def opened_binary(config: DriverConfig, binary: Path) -> Iterator[int]:
    """Open a gVisor. If it is in our home, raise Untrusted unless only this user can change it."""
    program = open_trusted(binary) if binary == config.program else os.open(binary, os.O_RDONLY)
    try:
        yield program
    finally:
        os.close(program)


def release_in(version: str) -> int:
    """Return the release date in the output of `runsc --version`; 0 if there is none."""
    found = re.search(r"(?<!\d)20\d{6}(?!\d)", version)
    return int(found[0]) if found else 0


def confinement() -> Confinement:
    """Return how to confine a machine's processes. As root each machine gets an unused uid."""
    return Confinement(uid=own_user(), offline=False)


async def _trouble(config: DriverConfig, binary: Path, platform: str) -> str | None:
    """Return None if a program runs in gVisor, or ran in the same circumstances; otherwise what went wrong."""
    verdicts, question = Verdicts(config.cache_dir), f"gvisor-{platform}"
    details = {"binary": identity(binary, binary.stat()), **privileges()}
    if verdicts.get(question, **details) is not None:
        return None
    trouble = await _try(config, binary, platform)
    if trouble is None:  # failures are not cached: the user may fix them any time
        verdicts.keep(question, Verdict(True, f"a program ran in gVisor ({platform})"), **details)
    return trouble


async def _try(config: DriverConfig, binary: Path, platform: str) -> str | None:
    """Run a program of the host in gVisor, confined like a machine; return None, or what went wrong."""
    bundle = sealed_bytes(command.probe_json())
    try:
        with opened_binary(config, binary) as program, anyio.fail_after(DEADLINE_S):
            runsc = command.runsc_argv(f"/proc/self/fd/{program}", platform)
            order = [*runsc, "run", f"--bundle={command.BUNDLE}", command.NAME]
            argv = command.in_machine(order, bundle, {}, programs=True)
            async with spawn(argv, confinement=confinement(), pass_fds=(program, bundle)) as process:
                end = await process.wait()
                return None if end.code == 0 else str(end)
    except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not installed
        return str(error) or f"it did not end in {DEADLINE_S:.0f} s"
    finally:
        os.close(bundle)
