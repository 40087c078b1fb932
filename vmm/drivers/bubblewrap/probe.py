"""Whether bubblewrap can run machines on this host, found by running one."""

import os
import re
from pathlib import Path

import anyio

from vmm import limits
from vmm.drivers.bubblewrap import command
from vmm.errors import DriverUnavailable
from vmm.limits import Hierarchy
from vmm.probe import missing_protections, namespace_advice, own_user, version_output
from vmm.process import SHOWN, Confinement, find_tool, spawn
from vmm.types import NetworkMode, Probe

DEADLINE_S = 10.0  # it takes milliseconds
INSTALL = "apt-get install bubblewrap"
NEEDED_VERSION = (0, 8)  # the first with --disable-userns
PROBE_WORD = "MCP_SANDBOX_PROBE_OK"

WEAKNESSES = (
    "machines share the host's kernel: a kernel bug lets code escape",
    "agent and code run as the same user in the machine: code can make the agent report wrong things about it",
    "machines see the host's kernel version, CPU model and load, and the path of the template's tree",
)


async def probe(hierarchy: Hierarchy) -> Probe:
    """Return whether bubblewrap can run machines on this host."""
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
        return Probe(usable=False, reason=f"no machine starts: {trouble}", fix=namespace_advice(), version=name)
    reason = "a program ran in namespaces with a seccomp filter"
    return Probe(usable=True, reason=reason, version=name, missing_protections=(*WEAKNESSES, *_missing(hierarchy)))


def confinement(tree: Path, network: NetworkMode = NetworkMode.NONE) -> Confinement:
    """Return how to confine bubblewrap itself. As root it gets an unused uid for each machine, and the tree at SHOWN.

    Bubblewrap creates the network namespace of a machine without a device. One with a device is in a namespace that
    belongs to root, and that no process of the machine can change.
    """
    uid = own_user()
    return Confinement(uid=uid, offline=network is NetworkMode.NAT, show=None if uid is None else tree)


def place_of(tree: Path, confined: Confinement) -> str:
    """Return where a process with this confinement finds the tree."""
    return SHOWN if confined.show is not None else str(tree)


async def _trouble(binary: str) -> str | None:
    """Start a machine that prints a word; return None, or what went wrong."""
    usr = Path("/usr")
    confined = confinement(usr)
    box = command.probe_box(place_of(usr, confined))
    with command.prepared(binary, box, ["/bin/sh", "-c", f"echo {PROBE_WORD}"]) as start:
        try:
            with anyio.fail_after(DEADLINE_S):
                async with spawn(start.argv, confinement=confined, pass_fds=start.files) as process:
                    end = await process.wait()
                    return None if end.code == 0 and PROBE_WORD in end.detail else str(end)
        except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not installed
            return str(error) or f"it did not end in {DEADLINE_S:.0f} s"


async def _version(binary: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", await version_output(binary, "--version"))[:3])


def _missing(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Return the protections that machines lack on this host or because of this user, one sentence each."""
    missing = list(missing_protections(hierarchy))
    if not hierarchy.usable and not limits.nproc_is_per_machine():
        missing.append("no limit on the number of a machine's processes: this kernel is older than 5.14")
    if os.geteuid() != 0:
        missing.append("machines count against this user's kernel limits: inotify watches, pipes, pending signals")
    return tuple(missing)
