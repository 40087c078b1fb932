"""Install Python wheels into an image's tree, using the image's own Python."""

import importlib.util
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from templates.environment import pip_settings
from templates.model import DebianSource
from templates.removal import remove_tree
from templates.tools import StepFailed, Tools

JOBS = 4  # pips at once: each waits for the network, or unpacks
# How pip starts a script: with its own interpreter, if need be by way of a shell.
_HEADER = re.compile(rb"\A#!(/bin/sh\n'''exec' .*\n' '''|.*python.*)\n")


async def install_wheels(tools: Tools, tree: Path, site: Path, source: DebianSource) -> None:
    """Install wheels into `site` with the Python of `tree`, scripts into `site`/bin.

    A source that names its dependencies is complete: then nothing is resolved, and several pips share the work.
    """
    site.mkdir()
    complete = source.dependencies is not None
    wheels = [*source.wheels, *(source.dependencies or ())]
    groups = [wheels[start::JOBS] for start in range(JOBS)] if complete else [wheels]
    async with anyio.create_task_group() as tasks:
        for group in filter(None, groups):
            tasks.start_soon(_install, tools, tree, site, group, complete)
    _remove_unused(site)


def installed_wheels(tree: Path) -> list[str]:
    """Return the wheels of an image's tree with their versions."""
    names = [path.name.removesuffix(".dist-info") for path in (tree / site_of(tree)).glob("*.dist-info")]
    return sorted(name.replace("-", "==", 1) for name in names)


def site_of(tree: Path) -> str:
    """Return where a tree has its wheels, as a relative path."""
    return f"usr/local/lib/{guest_python(tree).name}/dist-packages"


async def _install(tools: Tools, tree: Path, site: Path, wheels: Sequence[str], complete: bool) -> None:
    pip = importlib.util.find_spec("pip")
    if pip is None or not pip.submodule_search_locations:
        raise StepFailed("pip is not installed in the environment of mcp-sandbox; run: python -m ensurepip")
    command, env = guest_python_command(tree)
    scratch = Path(tempfile.mkdtemp(prefix="pip-", dir=site.parent))
    target, temporary = scratch / "site", scratch / "tmp"
    temporary.mkdir()
    # Nothing of the packages runs, so that pip may have the operator's settings.
    env = {**pip_settings(), **env, "TMPDIR": str(temporary)}
    options = (
        *("--target", str(target), "--only-binary", ":all:", "--no-compile"),
        *(["--no-deps", "--no-cache-dir"] if complete else []),  # a cache would double what is written
        *("--no-input", "--progress-bar", "off", "--disable-pip-version-check", "--root-user-action", "ignore"),
    )
    await tools.run([*command, pip.submodule_search_locations[0], "install", *options, *wheels], env=env)
    _merge(target, site)
    await anyio.to_thread.run_sync(remove_tree, scratch)


def _merge(source: Path, target: Path) -> None:
    """Move everything in `source` to `target`, and what is in directories that both have."""
    for path in source.iterdir():
        if (target / path.name).is_dir():
            _merge(path, target / path.name)
        else:
            path.rename(target / path.name)


def add_to_tree(site: Path, tree: Path) -> None:
    """Move what `install_wheels` made to its place in an image's tree, scripts to a directory on the PATH."""
    scripts, programs = site / "bin", tree / "usr/local/bin"
    programs.mkdir(parents=True, exist_ok=True)
    for script in filter(Path.is_file, scripts.glob("*")):
        program = programs / script.name
        program.write_bytes(_HEADER.sub(b"#!/usr/bin/python3\n", script.read_bytes(), count=1))
        program.chmod(0o755)
    remove_tree(scripts)
    place = tree / site_of(tree)
    place.mkdir(parents=True, exist_ok=True)
    _merge(site, place)


async def compile_python(tools: Tools, tree: Path, places: Mapping[Path, str]) -> None:
    """Compile Python files in advance, with the Python of `tree`: machines could not store the result, and emulated
    ones are slow at it. `places` are directories, and where they are in the machine.

    Files that do not compile are skipped; packages ship some on purpose. So are tests, a third of some packages.
    """
    # From Python 3.13 on, compileall starts a server for its processes, without the image's loader: forks need none.
    program = (
        "import compileall, multiprocessing, re, sys\n"
        "multiprocessing.get_context = lambda _method=None: multiprocessing.context.ForkContext()\n"
        "tests = re.compile(r'/tests/(.*/)?test_[^/]*$')\n"
        "for path, place in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    compileall.compile_dir(path, quiet=2, workers=0, stripdir=path, prependdir=place, rx=tests)\n"
    )
    command, env = guest_python_command(tree)
    pairs = [text for path, place in places.items() if path.is_dir() for text in (str(path), place)]
    await tools.run([*command, "-c", program, *pairs], env=env)


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
    """Remove the packages' top-level test suites, and files that belong elsewhere than `--target` puts them.

    Nested `tests` stay: numpy.testing imports from one.
    """
    for path in [site / "share", site / "etc", *site.glob("*/tests")]:
        remove_tree(path)
