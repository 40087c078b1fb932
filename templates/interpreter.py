"""A Python of our own for the agent, in images that have none or one of any kind.

It is Debian's, with its C library and loader beside it in one directory, and finds nothing anywhere else: an image may
have another C library, or none. Its loader's path and that of its libraries are written into the program itself, so
that no variable is needed which programs it starts would inherit.
"""

import platform
import shutil
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates import apt
from templates.packages import PrivateApt
from templates.tools import StepFailed, Tools
from vmm.agent import PYTHON

FOLDER = "root"
RECIPE = 1  # raise it when a change here must reach machines that are already built
_SUITE, _VERSION = "bookworm", "python3.11"
_PACKAGES = (f"{_VERSION}-minimal", f"lib{_VERSION}-minimal", f"lib{_VERSION}-stdlib")
_LIBRARIES = ("libc6", "libexpat1", "libffi8", "zlib1g")
_EDITOR = ("patchelf", "libstdc++6", "libgcc-s1")  # it runs with the fetched libraries: the host needs none of it
PLACE = str(Path(PYTHON).parent)
_LOADER = "lib/*/ld-linux-*.so.*"
# Parts of the standard library that the agent and its kernels have no use for.
_BALLAST = ("ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo", "unittest")


def interpreter_inputs() -> dict[str, Any]:
    """What the interpreter depends on."""
    packages = (*_PACKAGES, *_LIBRARIES)
    return {"recipe": RECIPE, "suite": _SUITE, "packages": packages, "machine": platform.machine(), "place": PLACE}


async def make_interpreter(tools: Tools, staging: Path) -> dict[str, Any]:
    """Put all that has to lie in a machine's /usr/lib/mcp-sandbox into `staging`/root."""
    sources = apt.sources_for(_SUITE)
    if sources is None:
        raise StepFailed("only on Debian with its own package sources can the agent's own Python be fetched")
    work = staging / "work"
    packages = PrivateApt(tools, work, sources)
    await packages.update()
    names = await packages.unpack(*_PACKAGES, *_LIBRARIES, *_EDITOR)
    root = staging / FOLDER
    await anyio.to_thread.run_sync(_gather, packages, root)
    run = [str(root / "lib" / packages.find(_LOADER).name), "--library-path", str(root / "lib")]
    python = str(root / Path(PYTHON).name)
    loader, libraries = f"{PLACE}/lib/{Path(run[0]).name}", f"{PLACE}/lib"
    # The old kind of path, which goes before all variables and counts for libraries of libraries too.
    paths = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", libraries)
    await tools.run([*run, str(packages.find("usr/bin/patchelf")), *paths, python])
    for library in (root / "lib").glob("libstdc++*"):
        library.unlink()  # the editor's
    # By hash and not by time: what is copied into an image stays valid.
    compiled = ("-m", "compileall", "-q", "--invalidation-mode=unchecked-hash", str(root / "lib" / _VERSION))
    await tools.run([*run, python, *compiled], env={"PYTHONHOME": str(root), "PYTHONPATH": ""})
    shutil.rmtree(work)
    return {"packages": names}


def _gather(packages: PrivateApt, root: Path) -> None:
    """Lay out what the packages have as a directory that Python takes for its prefix, because of where it lies."""
    (root / "lib").mkdir(parents=True)
    shutil.copy(packages.find(f"usr/bin/{_VERSION}"), root / Path(PYTHON).name)
    shutil.copytree(packages.find(f"usr/lib/{_VERSION}"), root / "lib" / _VERSION, ignore=_left_out)
    for folder in {packages.find(_LOADER).parent, packages.find("usr/lib/*/libffi.so.*").parent}:
        for library in folder.glob("*.so*"):
            shutil.copy(library, root / "lib" / library.name)


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Links lead to settings in /etc, which are not ours."""
    return [name for name in names if name in _BALLAST or Path(folder, name).is_symlink()]
