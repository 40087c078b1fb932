"""Whether gVisor can run machines on this host, with which binary and platform, found by running one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio

from vmm.driver import DriverConfig
from vmm.drivers.gvisor import RUNSC, command, release
from vmm.drivers.gvisor.release import Release
from vmm.errors import Untrusted
from vmm.limits import Hierarchy
from vmm.memory import sealed_bytes
from vmm.probe import identity, missing_protections, namespace_advice, own_user, privileges
from vmm.process import Confinement, find_tool, spawn
from vmm.trust import open_trusted
from vmm.types import NetworkMode, Probe
from vmm.verdicts import Verdict, Verdicts

DEADLINE_S = 15.0  # it takes 0.2 s
# How gVisor intercepts system calls, best first. `kvm` needs working hardware virtualization.
PLATFORMS = ("systrap", "kvm", "ptrace")
SETUP = "mcp-sandbox setup --driver gvisor"
NO_CHOICE = "mcp-sandbox setup --driver gvisor --runsc none"  # back to the one of Debian
OTHER_SETTING = "set runsc to the path of another one, or remove the setting"


@dataclass(frozen=True, slots=True)
class Engine:
    """A gVisor that works on this host."""

    binary: Path
    release: Release
    platform: str

    def argv(self, program: int, network: NetworkMode) -> list[str]:
        """Return runsc, an open file, with our options; append a command."""
        path = f"/proc/self/fd/{program}"
        return [*command.runsc_argv(path, self.platform, network), *self.release.arguments("flags")]


async def probe(config: DriverConfig, hierarchy: Hierarchy) -> tuple[Probe, Engine | None]:
    """Return whether gVisor can run machines on this host, and the engine that does."""
    found, reason = await find_binary(config)
    if found is None:
        return _without_binary(config, reason), None
    binary, known = found
    about = Probe(
        usable=False,
        reason="",
        version=known.version,
        missing_protections=missing_protections(hierarchy),
        program=binary,
        features=known.options,
    )
    troubles = []
    for platform in PLATFORMS:
        trouble = await _trouble(config, binary, platform)
        if trouble is None:
            verdict = replace(about, usable=True, reason=f"a program ran in gVisor ({platform})")
            return verdict, Engine(binary, known, platform)
        troubles.append(f"{platform}: {trouble}")
    reason = f"no program ran in gVisor: {'; '.join(troubles)}"
    return replace(about, reason=reason, fix=namespace_advice()), None


async def find_binary(config: DriverConfig) -> tuple[tuple[Path, Release] | None, str]:
    """Return the first gVisor that can do what we need, and what it is; or None and the reason."""
    reason = "the chosen runsc is not in the home any more" if config.chosen else "runsc is not installed"
    for binary in _candidates(config):
        try:
            found = await _release_of(config, binary)
        except (Untrusted, OSError) as error:
            return None, str(error)
        if found is None:
            reason = f"{binary} does not run"
        elif found.missing:
            reason = f"{binary} is {found.version}, which is too old: it has no `{found.missing[0]}`"
        else:
            return (binary, found), ""
    return None, reason


def _candidates(config: DriverConfig) -> list[Path]:
    """Return the programs to try. Nothing takes the place of one that the operator chose, perhaps for its fixes."""
    if config.binary:
        return [config.binary]
    system = None if config.chosen else find_tool("runsc")
    return [*filter(None, (config.program, Path(system) if system else None))]


def _without_binary(config: DriverConfig, reason: str) -> Probe:
    if config.binary:
        return Probe(usable=False, reason=reason, fix=OTHER_SETTING)
    if config.chosen:
        return Probe(usable=False, reason=reason, fix=NO_CHOICE)
    return Probe(usable=False, reason=reason, fix=SETUP if find_tool("apt-get") else RUNSC.by_hand, lacks=RUNSC)


async def _release_of(config: DriverConfig, binary: Path) -> Release | None:
    """Return what a runsc is, None if it does not run. Asking takes 0.1 s, so it is done once. Raise Untrusted."""
    with opened_binary(config, binary) as program:
        verdicts, question, details = Verdicts(config.cache_dir), "gvisor-release", identity(binary)
        if (cached := verdicts.get(question, **details)) is not None:
            return Release.parse(cached.reason)
        found = await release.ask(program)
        if found is not None and not found.missing:  # on a busy host it may not have answered all questions
            verdicts.keep(question, Verdict(True, found.dump()), **details)
        return found


@contextmanager
def opened_binary(config: DriverConfig, binary: Path) -> Iterator[int]:
    """Open a gVisor. If it is in our home, raise Untrusted unless only this user can change it."""
    program = open_trusted(binary) if binary == config.program else os.open(binary, os.O_RDONLY)
    try:
        yield program
    finally:
        os.close(program)


def confinement() -> Confinement:
    """Return how to confine a machine's processes. As root each machine gets an unused uid."""
    return Confinement(uid=own_user(), offline=False)


async def _trouble(config: DriverConfig, binary: Path, platform: str) -> str | None:
    """Return None if a program runs in gVisor, or ran in the same circumstances; otherwise what went wrong."""
    verdicts, question, details = Verdicts(config.cache_dir), f"gvisor-{platform}", identity(binary) | privileges()
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
