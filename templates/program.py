"""Download a driver's program for hosts that have none, or one that is too old.

It is kept in the store; the system's own is not touched.
"""

import platform
import shutil
from pathlib import Path
from typing import Any

from templates import apt_sources
from templates.private_apt import PrivateApt
from templates.removal import remove_tree
from templates.store import Entry
from templates.tools import StepFailed, Tools
from vmm.types import Program

RECIPE = 1  # part of the cache key: raise it when a change here requires a new download


def program_inputs(program: Program) -> dict[str, Any]:
    """Return the inputs of a downloaded program."""
    return {"recipe": RECIPE, "package": program.package, "suite": _suite(program), "machine": platform.machine()}


def path_in(entry: Entry, program: Program) -> Path:
    """Return where a downloaded program is."""
    return entry.path / Path(program.path).name


async def make_program(tools: Tools, staging: Path, *, program: Program) -> dict[str, Any]:
    """Write a program to `staging`, from a Debian package whose signature apt has verified."""
    work = staging / "work"
    packages = PrivateApt(tools, work, program_sources(program))
    await packages.update()
    (name,) = await packages.unpack(program.package)
    found = staging / Path(program.path).name
    shutil.move(packages.find(program.path), found)
    found.chmod(0o755)  # regardless of the umask: machines run as other users
    remove_tree(work)
    return {"package": name}


def program_sources(program: Program) -> str:
    """Return the apt sources that have a program."""
    sources = apt_sources.sources_for(suite) if (suite := _suite(program)) else None
    if sources is None:
        raise StepFailed(
            f"{program.title} can only be downloaded on Debian with Debian's package sources; {program.by_hand}"
        )
    return sources


def _suite(program: Program) -> str | None:
    """Return the suite to download from: the host's, or the first later one whose package is new enough."""
    codename = apt_sources.host_codename()
    return program.first_good if codename in program.too_old else codename
