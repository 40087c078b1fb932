"""From a base layer to the read-only root image of a template."""

import importlib.util
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates.links import inside, link_in, mount_point_in, read_in, remove_in, vacated_in, write_in
from templates.model import Template
from templates.tools import StepFailed, Tools
from vmm.agent import PYTHON

IMAGE = "root.erofs"
RECIPE = 5  # raise it when a change here must reach machines that are already built
READABLE = 0o644  # whatever the umask is: machines run as users of their own
SANDBOX_UID = 1000  # whom user code runs as; the agent knows it too
HOME = "/workspace"

# The same in every image: nobody looks for it, and a random one would be one more difference between builds.
_UUID = "6d637073-6273-4d78-8000-000000000001"

# Files that would give away the host that built the image.
_NEUTRAL = {
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/resolv.conf": "",
}
# Who a machine is changes at every restore: the agent writes these, and in memory that is quick.
_IDENTITY = {
    "etc/hostname": "/run/mcp-sandbox/hostname",
    "etc/machine-id": "/run/mcp-sandbox/machine-id",
}
# Where drivers mount what is a machine's own: nobody can make a directory in an image that is read-only.
_MOUNT_POINTS = {
    HOME.lstrip("/"): 0o755,
    "dev": 0o755,
    "proc": 0o755,
    "run": 0o755,
    "sys": 0o755,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
}
# The account of user code, and root's where an image has none.
_ACCOUNTS = {
    "etc/passwd": (f"sandbox:x:{SANDBOX_UID}:{SANDBOX_UID}:Sandbox:{HOME}:{{shell}}", "root:x:0:0:root:/root:{shell}"),
    "etc/group": (f"sandbox:x:{SANDBOX_UID}:", "root:x:0:"),
    "etc/shadow": ("sandbox:!:20000:0:99999:7:::", "root:!:20000:0:99999:7:::"),
    "etc/gshadow": ("sandbox:!::", "root:!::"),
}
_ID_FIELD = 2  # of a line in passwd and group


def image_inputs(template: Template, base_key: str) -> dict[str, Any]:
    """What the image of a template depends on."""
    assert template.source.debian is not None
    return {"recipe": RECIPE, "base": base_key, "wheels": sorted(template.source.debian.wheels)}


def layered_image_inputs(layers_key: str, interpreter_key: str) -> dict[str, Any]:
    """What an image made from somebody else's layers depends on."""
    return {"recipe": RECIPE, "layers": layers_key, "interpreter": interpreter_key}


async def make_image(tools: Tools, staging: Path, template: Template, base_tar: Path) -> dict[str, Any]:
    """Build `staging`/root.erofs: the base, the wheels, and an account for user code."""
    tree = staging / "tree"
    await extract_tree(tools, base_tar, tree)
    prepare_tree(tree)
    link_in(tree, PYTHON.lstrip("/"), "/usr/bin/python3")
    assert template.source.debian is not None
    wheels = await install_wheels(tools, tree, template.source.debian.wheels)
    await compile_python(tools, tree)
    await _finish(tools, tree, staging)
    return {"template": template.name, "wheels": wheels}


async def make_layered_image(
    tools: Tools, staging: Path, layers_tar: Path, interpreter: Path, details: Mapping[str, Any]
) -> dict[str, Any]:
    """Build `staging`/root.erofs from layers: an account for user code, and a Python for the agent. Nothing of it runs.

    `details` is what is known about the layers; it stays with the image.
    """
    tree = staging / "tree"
    tools.note("unpacking the layers")
    await extract_tree(tools, layers_tar, tree)
    prepare_tree(tree)
    tools.note("adding the agent's own Python")
    place = vacated_in(tree, str(Path(PYTHON).parent).lstrip("/"))
    await anyio.to_thread.run_sync(shutil.copytree, interpreter, place)
    await _finish(tools, tree, staging)
    return dict(details)


async def _finish(tools: Tools, tree: Path, staging: Path) -> None:
    tools.note("packing the image")
    await anyio.to_thread.run_sync(open_to_all, tree)
    await pack_tree(tools, tree, staging / IMAGE)
    await anyio.to_thread.run_sync(shutil.rmtree, tree)


async def extract_tree(tools: Tools, base_tar: Path, tree: Path) -> None:
    """Unpack a base layer; works for ordinary users, who cannot give files away."""
    tree.mkdir()
    options = ("--no-same-owner", "--same-permissions")
    await tools.run(["tar", "--extract", *options, f"--file={base_tar}", f"--directory={tree}"])


def prepare_tree(tree: Path) -> None:
    """Add the account for user code and take out what belongs to the host. The tree may be a stranger's."""
    shell = "/bin/bash" if inside(tree, "bin/bash").is_file() else "/bin/sh"
    for name, lines in _ACCOUNTS.items():
        write_in(tree, name, _with_account(read_in(tree, name), *(line.format(shell=shell) for line in lines)))
    for name, text in _NEUTRAL.items():
        write_in(tree, name, text)
    for name, target in _IDENTITY.items():
        link_in(tree, name, target)
    remove_in(tree, "etc/apt/sources.list")  # names the mirror of the host
    for name, mode in _MOUNT_POINTS.items():
        mount_point_in(tree, name, mode)


def _with_account(text: str, sandbox: str, root: str) -> str:
    """A file of accounts with that of user code before all others of the same id: the first is the one that counts."""
    lines = [line for line in text.splitlines() if not line.startswith("sandbox:")] or [root]
    same = [line for line in lines if line.split(":")[_ID_FIELD : _ID_FIELD + 1] == [str(SANDBOX_UID)]]
    return "".join(f"{line}\n" for line in (*(line for line in lines if line not in same), sandbox, *same))


def open_to_all(tree: Path) -> None:
    """Let everyone read all files and run all programs, as nobody but themselves, whatever the builder's umask is.

    There are no secrets in an image, and machines run as users of their own. A program with the right to become
    root must not lie around on the host either.
    """
    for folder, _, files in os.walk(tree):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode):
                runs = stat.S_ISDIR(mode) or mode & stat.S_IXUSR
                path.chmod(mode & 0o1777 | stat.S_IWUSR | 0o444 | (0o111 if runs else 0))


async def install_wheels(tools: Tools, tree: Path, wheels: Sequence[str]) -> list[str]:
    """Install wheels for the machine's own Python; returns all that came, with versions."""
    site = tree / f"usr/local/lib/{guest_python(tree).name}/dist-packages"
    site.mkdir(parents=True, exist_ok=True)
    if not wheels:
        return []
    pip = importlib.util.find_spec("pip")
    if pip is None or not pip.submodule_search_locations:
        raise StepFailed("pip is not installed beside mcp-sandbox; run: python -m ensurepip")
    command, env = guest_python_command(tree)
    options = (
        *("--target", str(site), "--only-binary", ":all:", "--no-compile"),
        *("--no-input", "--progress-bar", "off", "--disable-pip-version-check", "--root-user-action", "ignore"),
    )
    await tools.run([*command, pip.submodule_search_locations[0], "install", *options, *wheels], env=env)
    _drop_ballast(site)
    return sorted(path.name.removesuffix(".dist-info").replace("-", "==", 1) for path in site.glob("*.dist-info"))


async def compile_python(tools: Tools, tree: Path) -> None:
    """Compile all Python files once, here: machines could not keep the result, and emulated ones are slow at it.

    Files that do not compile stay as they are; packages ship some on purpose.
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


async def pack_tree(tools: Tools, tree: Path, image: Path) -> None:
    """Pack a tree into one erofs file, uncompressed: unpacking would cost emulated machines dearly.

    The ends of files are not packed among the inodes, where gVisor could not map them. Modification times are kept,
    for compiled Python files are only valid beside the times they were made for.
    """
    await tools.run(["mkfs.erofs", "--quiet", "--all-root", "-E", "noinline_data", "-U", _UUID, str(image), str(tree)])
    image.chmod(READABLE)


def guest_python(tree: Path) -> Path:
    """The machine's own interpreter, such as <tree>/usr/bin/python3.11."""
    link = tree / "usr/bin/python3"
    if not link.is_symlink() or not re.fullmatch(r"python3\.\d+", target := str(link.readlink())):
        raise StepFailed("the base layer has no python3")
    return tree / "usr/bin" / target


def guest_python_command(tree: Path) -> tuple[list[str], dict[str, str]]:
    """How to run the machine's own Python on this host: command and environment.

    Through the machine's own loader and libraries, so that pip chooses wheels and reads requirements exactly
    as it would in the machine, whichever Python and C library this host has.
    """
    loaders = sorted(tree.glob("usr/lib/*/ld-linux-*.so.*"))
    if not loaders:
        raise StepFailed("the base layer has no dynamic loader")
    command = [str(loaders[0]), "--library-path", str(loaders[0].parent), str(guest_python(tree))]
    env = {
        "PYTHONHOME": str(tree / "usr"),
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": "",
    }
    return command, env


def _drop_ballast(site: Path) -> None:
    """Remove programs nobody can call and the test suites of whole packages.

    Deeper `tests` stay: numpy.testing imports from one.
    """
    for path in [site / "bin", *site.glob("*/tests")]:
        shutil.rmtree(path, ignore_errors=True)
