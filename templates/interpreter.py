"""Make the agent's own Python, for images that may have none.

It is Debian's Python with its C library and loader in one directory, and it uses nothing outside of it: an image may
have another C library, or none. The paths of loader and libraries are patched into the program, because environment
variables would be inherited by the programs it starts.
"""

import platform
import shutil
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates import apt_sources
from templates.private_apt import PrivateApt
from templates.removal import remove_tree
from templates.tools import StepFailed, Tools
from vmm.agent import PYTHON

FOLDER = "root"
RECIPE = 1  # part of the cache key: raise it when a change here requires a rebuild
_SUITE, _VERSION = "bookworm", "python3.11"
_LIBRARIES = ("libc6", "libexpat1", "libffi8", "zlib1g")
PACKAGES = (f"{_VERSION}-minimal", f"lib{_VERSION}-minimal", f"lib{_VERSION}-stdlib", *_LIBRARIES)
_EDITOR = ("patchelf", "libstdc++6", "libgcc-s1")  # runs with the downloaded libraries, so the host needs nothing
PLACE = str(Path(PYTHON).parent)
_LOADER = "lib/*/ld-linux-*.so.*"
# Parts of the standard library that neither the agent nor its kernels use.
_UNUSED = ("ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo", "unittest")


def interpreter_inputs() -> dict[str, Any]:
    """Return the inputs of the interpreter."""
    return {"recipe": RECIPE, "suite": _SUITE, "packages": PACKAGES, "machine": platform.machine(), "place": PLACE}


def interpreter_sources() -> str:
    """Return the apt sources of the interpreter."""
    sources = apt_sources.sources_for(_SUITE)
    if sources is None:
        raise StepFailed("the agent's Python can only be downloaded on Debian with Debian's package sources")
    return sources


async def make_interpreter(tools: Tools, staging: Path) -> dict[str, Any]:
    """Write the contents of a machine's /usr/lib/mcp-sandbox to `staging`/root."""
    work = staging / "work"
    packages = PrivateApt(tools, work, interpreter_sources())
    await packages.update()
    names = await packages.unpack(*PACKAGES, *_EDITOR)
    root = staging / FOLDER
    await anyio.to_thread.run_sync(_gather, packages, root)
    run = [str(root / "lib" / packages.find(_LOADER).name), "--library-path", str(root / "lib")]
    python = str(root / Path(PYTHON).name)
    loader, libraries = f"{PLACE}/lib/{Path(run[0]).name}", f"{PLACE}/lib"
    # RPATH, not RUNPATH: it goes before LD_LIBRARY_PATH and applies to the libraries' own dependencies.
    paths = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", libraries)
    await tools.run([*run, str(packages.find("usr/bin/patchelf")), *paths, python])
    for library in (root / "lib").glob("libstdc++*"):
        library.unlink()  # only patchelf needs it
    # By hash, not by time, so that copies in an image stay valid.
    compiled = ("-m", "compileall", "-q", "--invalidation-mode=unchecked-hash", str(root / "lib" / _VERSION))
    await tools.run([*run, python, *compiled], env={"PYTHONHOME": str(root), "PYTHONPATH": ""})
    remove_tree(work)
    return {"packages": names}


def _gather(packages: PrivateApt, root: Path) -> None:
    """Arrange the packages' files so that Python finds its prefix from its own location."""
    (root / "lib").mkdir(parents=True)
    shutil.copy(packages.find(f"usr/bin/{_VERSION}"), root / Path(PYTHON).name)
    shutil.copytree(packages.find(f"usr/lib/{_VERSION}"), root / "lib" / _VERSION, ignore=_ignored)
    for folder in {packages.find(_LOADER).parent, packages.find("usr/lib/*/libffi.so.*").parent}:
        for library in folder.glob("*.so*"):
            shutil.copy(library, root / "lib" / library.name)


def _ignored(folder: str, names: list[str]) -> list[str]:
    """Leave out unused modules, and symbolic links: they point to settings in /etc."""
    return [name for name in names if name in _UNUSED or Path(folder, name).is_symlink()]
