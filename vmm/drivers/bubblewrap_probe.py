"""Whether bubblewrap can run machines on this host, from a machine that really ran, and what protects it."""

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

import anyio

from vmm.drivers import bubblewrap_command as command
from vmm.errors import DriverUnavailable, ToolFailed
from vmm.limits import Hierarchy
from vmm.probe import ROOT_ADVICE, UIDS, USER_ADVICE
from vmm.process import SHOWN, Confinement, find_tool, run_tool, spawn
from vmm.types import Probe

DEADLINE_S = 10.0  # it takes milliseconds
INSTALL = "apt-get install bubblewrap"
NEEDED_VERSION = (0, 8)  # the first that can keep machines from making user namespaces
PROBE_WORD = "MCP_SANDBOX_PROBE_OK"
APPARMOR_SWITCH = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
APPARMOR_ADVICE = "let bubblewrap make namespaces: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
NAMESPACED_COUNTS = (5, 14)  # since this kernel, how many processes a user may have is counted by user namespace

WEAKNESSES = (
    "machines share the host's kernel: a fault in it is a way out of the machine",
    "the agent and the code it runs are one user in the machine: code can mislead the agent about its own machine",
    "machines can see the host's kernel version, CPU, memory size and load, and where the template's tree lies",
)


async def probe(hierarchy: Hierarchy) -> Probe:
    """Can bubblewrap run machines here?"""
    binary = find_tool(command.PROGRAM)
    if binary is None:
        return Probe(usable=False, reason=f"{command.PROGRAM} is not installed", fix=INSTALL)
    version = await _version(binary)
    if version < NEEDED_VERSION:
        found, needed = (".".join(map(str, numbers)) for numbers in (version, NEEDED_VERSION))
        reason = f"bubblewrap {found or 'of unknown version'} is too old"
        return Probe(usable=False, reason=reason, fix=f"install bubblewrap {needed} or newer")
    name = f"bubblewrap {'.'.join(map(str, version))}"
    try:
        trouble = await _trouble(binary)
    except DriverUnavailable as error:
        return Probe(usable=False, reason=str(error), fix=error.fix, version=name)
    if trouble is not None:
        return Probe(usable=False, reason=f"no machine can be started: {trouble}", fix=_advice(), version=name)
    reason = "a program ran in namespaces of its own, its system calls filtered"
    return Probe(usable=True, reason=reason, version=name, limits=(*WEAKNESSES, *_not_in_force(hierarchy)))


def confinement(tree: Path) -> Confinement:
    """What bubblewrap itself may be: a user that owns nothing on this host, another one for each machine.

    Only root can become one; anybody else needs no help to get at a tree of their own. A machine's network namespace
    is made by bubblewrap.
    """
    if os.geteuid() != 0:
        return Confinement(offline=False)
    return Confinement(uid=secrets.choice(UIDS), offline=False, show=tree)


def place_of(tree: Path, confined: Confinement) -> str:
    """Where a process so confined finds the tree."""
    return SHOWN if confined.show is not None else str(tree)


def counts_processes() -> bool:
    """Whether a limit on the number of a machine's processes would count those of this machine alone."""
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    return os.geteuid() == 0 or release >= NAMESPACED_COUNTS


async def _trouble(binary: str) -> str | None:
    """Start a machine like all others that prints a word; None, or what went wrong."""
    usr = Path("/usr")
    confined = confinement(usr)
    box = command.probe_box(place_of(usr, confined))
    with command.prepared(binary, box, ["/bin/sh", "-c", f"echo {PROBE_WORD}"]) as start:
        try:
            with anyio.fail_after(DEADLINE_S):
                async with spawn(start.argv, confinement=confined, pass_fds=start.files) as process:
                    end = await process.wait()
                    return None if end.code == 0 and PROBE_WORD in end.detail else str(end)
        except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not there
            return str(error) or f"it did not end in {DEADLINE_S:.0f} s"


async def _version(binary: str) -> tuple[int, ...]:
    lines: list[str] = []
    with suppress(ToolFailed):
        await run_tool([binary, "--version"], on_line=lines.append)
    return tuple(int(number) for number in re.findall(r"\d+", " ".join(lines))[:3])


def _advice() -> str:
    if os.geteuid() == 0:
        return ROOT_ADVICE
    restricted = APPARMOR_SWITCH.exists() and APPARMOR_SWITCH.read_text().strip() != "0"
    return APPARMOR_ADVICE if restricted else USER_ADVICE


def _not_in_force(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Protections this host or this user does not give us."""
    missing = []
    if not hierarchy.usable:
        missing.append(f"no host-side limits on a machine's memory and CPU: {hierarchy.reason}")
        if not counts_processes():
            missing.append("no limit on the number of a machine's processes: this kernel is older than 5.14")
    if os.geteuid() != 0:
        missing.append("all machines run as this user: only root can give each one a user of its own")
    return tuple(missing)
