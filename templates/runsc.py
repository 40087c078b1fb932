"""gVisor's program for hosts that have none, or one too old to restore checkpoints as an ordinary user.

It lies in the store, beside the system's own and never over it.
"""

import platform
import shutil
from pathlib import Path
from typing import Any

from templates import apt
from templates.packages import PrivateApt
from templates.tools import StepFailed, Tools
from vmm.drivers.gvisor.probe import OLDEST

RUNSC = "runsc"
RECIPE = 1  # raise it when a change here must reach hosts that have it already
_PACKAGE = "runsc"
_TOO_OLD = {"bullseye", "bookworm"}  # suites whose own package is of no use
_FIRST_GOOD = "trixie"


def runsc_inputs() -> dict[str, Any]:
    """What the fetched program depends on."""
    return {"recipe": RECIPE, "package": _PACKAGE, "suite": _suite(), "machine": platform.machine()}


async def make_runsc(tools: Tools, staging: Path) -> dict[str, Any]:
    """Put runsc into `staging`, from a Debian package that the archive's key has signed."""
    sources = apt.sources_for(suite) if (suite := _suite()) else None
    if sources is None:
        raise StepFailed(
            "only on Debian with its own package sources can gVisor be fetched; "
            f"install runsc of {OLDEST // 10_000} or newer on the PATH"
        )
    work = staging / "work"
    packages = PrivateApt(tools, work, sources)
    await packages.update()
    (name,) = await packages.unpack(_PACKAGE)
    shutil.move(packages.find("usr/bin/runsc"), staging / RUNSC)
    (staging / RUNSC).chmod(0o755)  # whatever the umask is: machines are other users
    shutil.rmtree(work)
    return {"package": name}


def _suite() -> str | None:
    """The suite to fetch from: the host's own, or the first one after it whose package is new enough."""
    codename = apt.host_codename()
    return _FIRST_GOOD if codename in _TOO_OLD else codename
