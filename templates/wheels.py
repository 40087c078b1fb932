"""Install Python wheels into an image's tree, using the image's own Python."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from templates.environment import pip_settings
from templates.removal import remove_tree
from templates.tools import StepFailed, Tools


async def install_wheels(tools: Tools, tree: Path, wheels: Sequence[str]) -> list[str]:
    """Install wheels for the image's Python; return all installed packages with versions."""
    site = tree / f"usr/local/lib/{guest_python(tree).name}/dist-packages"
    site.mkdir(parents=True, exist_ok=True)
    if not wheels:
        return []
    pip = importlib.util.find_spec("pip")
    if pip is None or not pip.submodule_search_locations:
        raise StepFailed("pip is not installed in the environment of mcp-sandbox; run: python -m ensurepip")
    command, env = guest_python_command(tree)
    scratch = tree.parent / "pip"
    scratch.mkdir()
    # Nothing of the packages runs, so that pip may have the operator's settings.
    env = {**pip_settings(), **env, "TMPDIR": str(scratch)}
    options = (
        *("--target", str(site), "--only-binary", ":all:", "--no-compile"),
        *("--no-input", "--progress-bar", "off", "--disable-pip-version-check", "--root-user-action", "ignore"),
    )
    await tools.run([*command, pip.submodule_search_locations[0], "install", *options, *wheels], env=env)
    remove_tree(scratch)
    _remove_unused(site)
    return sorted(path.name.removesuffix(".dist-info").replace("-", "==", 1) for path in site.glob("*.dist-info"))


async def compile_python(tools: Tools, tree: Path) -> None:
    """Compile all Python files in advance: machines could not store the result, and emulated ones are slow at it.

    Files that do not compile are skipped; packages ship some on purpose.
    """
    program = (
        "import compileall, sys\n"
        "for path in sys.argv[2:]:\n"
        "    compileall.compile_dir(path, quiet=2, workers=0, stripdir=sys.argv[1], prependdir='/')\n"
    )
    command, env = guest_python_command(tree)
    name = guest_python(tree).name
    paths = [tree / f"usr/lib/{name}", tree / "usr/lib/python3", tree / f"usr/local/lib/{name}/dist-packages"]
    existing = [str(path) for path in paths if path.is_dir()]
    await tools.run([*command, "-c", program, str(tree), *existing], env=env)


def guest_python(tree: Path) -> Path:
    """Return the image's interpreter, such as <tree>/usr/bin/python3.11."""
    link = tree / "usr/bin/python3"
    if not link.is_symlink() or not re.fullmatch(r"python3\.\d+", target := str(link.readlink())):
        raise StepFailed("the base has no python3")
    return tree / "usr/bin" / target


def guest_python_command(tree: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment that run the image's Python on this host.

    It uses the image's loader and libraries, so that pip selects wheels exactly as it would in the machine. Without
    `site`, packages cannot run code at its start.
    """
    loaders = sorted(tree.glob("usr/lib/*/ld-linux-*.so.*"))
    if not loaders:
        raise StepFailed("the base has no dynamic loader")
    command = [str(loaders[0]), "--library-path", str(loaders[0].parent), str(guest_python(tree)), "-S"]
    env = {
        "PYTHONHOME": str(tree / "usr"),
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": "",
    }
    return command, env


def _remove_unused(site: Path) -> None:
    """Remove scripts, which are not on the PATH, and the packages' top-level test suites.

    Nested `tests` stay: numpy.testing imports from one.
    """
    for path in [site / "bin", *site.glob("*/tests")]:
        remove_tree(path)
