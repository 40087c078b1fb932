"""Whether bubblewrap can run machines on this host, from a machine that really ran, and what protects it."""

import os
import re
from pathlib import Path

import anyio

from vmm import limits
from vmm.drivers.bubblewrap import command
from vmm.errors import DriverUnavailable
from vmm.limits import Hierarchy
from vmm.probe import namespace_advice, not_in_force, own_user, words_of
from vmm.process import SHOWN, Confinement, find_tool, spawn
from vmm.types import Probe

DEADLINE_S = 10.0  # it takes milliseconds
INSTALL = "apt-get install bubblewrap"
NEEDED_VERSION = (0, 8)  # the first that can keep machines from making user namespaces
PROBE_WORD = "MCP_SANDBOX_PROBE_OK"

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
        return Probe(usable=False, reason=f"no machine can be started: {trouble}", fix=namespace_advice(), version=name)
    reason = "a program ran in namespaces of its own, its system calls filtered"
    return Probe(usable=True, reason=reason, version=name, limits=(*WEAKNESSES, *_not_in_force(hierarchy)))


def confinement(tree: Path) -> Confinement:
    """What bubblewrap itself may be: a user that owns nothing on this host, another one for each machine.

    Only root can become one; anybody else needs no help to get at a tree of their own. A machine's network namespace
    is made by bubblewrap.
    """
    uid = own_user()
    return Confinement(uid=uid, offline=False, show=None if uid is None else tree)


def place_of(tree: Path, confined: Confinement) -> str:
    """Where a process so confined finds the tree."""
    return SHOWN if confined.show is not None else str(tree)


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
    return tuple(int(number) for number in re.findall(r"\d+", await words_of(binary, "--version"))[:3])


def _not_in_force(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Protections this host or this user does not give us."""
    missing = list(not_in_force(hierarchy))
    if not hierarchy.usable and not limits.counts_apart():
        missing.append("no limit on the number of a machine's processes: this kernel is older than 5.14")
    if os.geteuid() != 0:
        missing.append("machines use up what the kernel grants this user: inotify watches, pipes, pending signals")
    return tuple(missing)
