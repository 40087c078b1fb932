"""Whether gVisor can run machines on this host, with which program and on which platform: found by trying."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import anyio

from vmm.driver import DriverConfig
from vmm.drivers.gvisor import command
from vmm.limits import Hierarchy
from vmm.memory import sealed_bytes
from vmm.probe import namespace_advice, not_in_force, own_user, words_of
from vmm.process import Confinement, find_tool, spawn
from vmm.types import Download, Probe

DEADLINE_S = 15.0  # it takes 0.2 s
OLDEST = 20240101  # releases before do not restore what they checkpointed well enough
# The way gVisor takes over a program's system calls, best first. `kvm` needs hardware that really works.
PLATFORMS = ("systrap", "kvm", "ptrace")
SETUP = "mcp-sandbox setup --driver gvisor"
BY_HAND = f"put a runsc of {OLDEST // 10_000} or newer on the PATH"


@dataclass(frozen=True, slots=True)
class Engine:
    """A gVisor that works here."""

    binary: Path
    version: str
    platform: str


async def probe(config: DriverConfig, hierarchy: Hierarchy) -> tuple[Probe, Engine | None]:
    """Can gVisor run machines here?"""
    found, reason = await find_binary(config)
    if found is None:
        fix = SETUP if find_tool("apt-get") else BY_HAND
        lacks = Download.RUNSC if config.runsc is None else None
        return Probe(usable=False, reason=reason, fix=fix, lacks=lacks), None
    binary, version = found
    missing = not_in_force(hierarchy)
    troubles = []
    for platform in PLATFORMS:
        trouble = await _try(binary, platform)
        if trouble is None:
            verdict = Probe(True, f"a program ran in it ({platform})", None, None, version, missing)
            return verdict, Engine(binary, version, platform)
        troubles.append(f"{platform}: {trouble}")
    reason = f"no program ran in it: {'; '.join(troubles)}"
    return Probe(False, reason, namespace_advice(), None, version, missing), None


async def find_binary(config: DriverConfig) -> tuple[tuple[Path, str] | None, str]:
    """The first gVisor that is new enough and its version, or None and why."""
    system = find_tool("runsc")
    reason = "runsc is not installed"
    for binary in filter(None, (config.runsc, Path(system) if system else None)):
        release = await release_of(binary)
        if release >= OLDEST:
            return (binary, f"runsc {release}"), ""
        reason = (
            f"{binary} is of {release}; checkpoints need {OLDEST} or newer" if release else f"{binary} does not run"
        )
    return None, reason


async def release_of(binary: Path) -> int:
    """The day a gVisor was released, as a number like 20240729; 0 if it does not tell."""
    return release_in(await words_of(str(binary), "--version"))


def release_in(words: str) -> int:
    """The same from what a gVisor says about its version."""
    found = re.search(r"(?<!\d)20\d{6}(?!\d)", words)
    return int(found[0]) if found else 0


def confinement() -> Confinement:
    """What a machine's processes may be: a user that owns nothing on this host, another one for each machine."""
    return Confinement(uid=own_user(), offline=False)


async def _try(binary: Path, platform: str) -> str | None:
    """Run a program of the host's in it, confined as machines are; None, or what went wrong."""
    program = os.open(binary, os.O_RDONLY)
    config = sealed_bytes(command.probe_json())
    runsc = command.runsc_argv(f"/proc/self/fd/{program}", platform)
    argv = command.in_namespaces(config, [*runsc, "run", f"--bundle={command.BUNDLE}", command.NAME])
    try:
        with anyio.fail_after(DEADLINE_S):
            async with spawn(argv, confinement=confinement(), pass_fds=(program, config)) as process:
                end = await process.wait()
                return None if end.code == 0 else str(end)
    except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not there
        return str(error) or f"it did not end in {DEADLINE_S:.0f} s"
    finally:
        os.close(program)
        os.close(config)
