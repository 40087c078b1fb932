"""Download gVisor's runsc for hosts that have none or one too old to restore checkpoints as an ordinary user.

It is kept in the store; the system's own runsc is not touched.
"""

import platform
import shutil
from pathlib import Path
from typing import Any

from templates import apt_sources
from templates.private_apt import PrivateApt
from templates.removal import remove_tree
from templates.tools import StepFailed, Tools
from vmm.drivers.gvisor.probe import OLDEST

RUNSC = "runsc"
RECIPE = 1  # part of the cache key: raise it when a change here requires a new download
PACKAGE = "runsc"
_TOO_OLD = {"bullseye", "bookworm"}  # suites whose package is too old
_FIRST_GOOD = "trixie"


def runsc_inputs() -> dict[str, Any]:
    """Return the inputs of the downloaded program."""
    return {"recipe": RECIPE, "package": PACKAGE, "suite": _suite(), "machine": platform.machine()}


async def make_runsc(tools: Tools, staging: Path) -> dict[str, Any]:
    """Write runsc to `staging`, from a Debian package whose signature apt has verified."""
    work = staging / "work"
    packages = PrivateApt(tools, work, runsc_sources())
    await packages.update()
    (name,) = await packages.unpack(PACKAGE)
    shutil.move(packages.find("usr/bin/runsc"), staging / RUNSC)
    (staging / RUNSC).chmod(0o755)  # regardless of the umask: machines run as other users
    remove_tree(work)
    return {"package": name}


def runsc_sources() -> str:
    """Return the apt sources of gVisor."""
    sources = apt_sources.sources_for(suite) if (suite := _suite()) else None
    if sources is None:
        raise StepFailed(
            "gVisor can only be downloaded on Debian with Debian's package sources; "
            f"install runsc of {OLDEST // 10_000} or newer on the PATH"
        )
    return sources


def _suite() -> str | None:
    """Return the suite to download from: the host's, or the first later one whose package is new enough."""
    codename = apt_sources.host_codename()
    return _FIRST_GOOD if codename in _TOO_OLD else codename
