"""Make a template's read-only root image, and the same files as a directory tree."""

import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates.disk import require_free
from templates.model import Template
from templates.namespaces import Private
from templates.removal import remove_tree
from templates.together import both
from templates.tools import Tools
from templates.untrusted_tree import clear_path_in, link_in, mount_point_in, read_in, remove_in, resolve_in, write_in
from templates.wheels import add_to_tree, compile_python, guest_python, install_wheels, installed_wheels, site_of
from vmm.agent import PYTHON

IMAGE = "root.erofs"
TREE = "root"
RECIPE = 7  # part of the cache key: raise it when a change here requires a rebuild
TREE_RECIPE = 1  # the same for trees
READABLE = 0o644  # regardless of the umask: machines run as other users
SANDBOX_UID = 1000  # user code runs as this user; the agent has the same number
HOME = "/workspace"

# Fixed, so that builds do not differ in it.
_UUID = "6d637073-6273-4d78-8000-000000000001"

# Files that would reveal the host that built the image.
_NEUTRAL = {
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
# A machine's identity changes at every restore. The agent writes these files, quickly because /run is in memory.
_IDENTITY = {
    "etc/hostname": "/run/mcp-sandbox/hostname",
    "etc/machine-id": "/run/mcp-sandbox/machine-id",
    "etc/resolv.conf": "/run/mcp-sandbox/resolv.conf",
}
# Drivers mount each machine's private file systems here: the image is read-only, so the directories must exist.
_MOUNT_POINTS = {
    HOME.lstrip("/"): 0o755,
    "dev": 0o755,
    "proc": 0o755,
    "run": 0o755,
    "sys": 0o755,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
}
# The account for user code, and root's for images without one.
_ACCOUNTS = {
    "etc/passwd": (f"sandbox:x:{SANDBOX_UID}:{SANDBOX_UID}:Sandbox:{HOME}:{{shell}}", "root:x:0:0:root:/root:{shell}"),
    "etc/group": (f"sandbox:x:{SANDBOX_UID}:", "root:x:0:"),
    "etc/shadow": ("sandbox:!:20000:0:99999:7:::", "root:!:20000:0:99999:7:::"),
    "etc/gshadow": ("sandbox:!::", "root:!::"),
}
# Takes the tree and a command for a shell in it. The mount ends with the namespace that this runs in.
_IN_TREE = 'mount --rbind /dev "$1/dev"; exec chroot "$1" sh -ec "$2"'
_ID_FIELD = 2  # position of the id in a line of passwd or group


def image_inputs(template: Template, base_key: str) -> dict[str, Any]:
    """Return the inputs of a template's image."""
    assert template.source.debian is not None
    source = template.source.debian
    inputs = {"recipe": RECIPE, "base": base_key, "wheels": sorted(source.wheels), "finish": source.finish}
    return inputs if source.dependencies is None else {**inputs, "dependencies": sorted(source.dependencies)}


def layered_image_inputs(layers_key: str, interpreter_key: str) -> dict[str, Any]:
    """Return the inputs of an image made from OCI layers."""
    return {"recipe": RECIPE, "layers": layers_key, "interpreter": interpreter_key}


async def make_image(
    tools: Tools, staging: Path, template: Template, base_tar: Path, layer: Callable[[], Awaitable[Path]] | None
) -> dict[str, Any]:
    """Write `staging`/root.erofs: the base or a layer on top of it, the wheels, and an account for user code.

    Wheels need only the base, so they are installed while `layer` is made.
    """
    source = template.source.debian
    assert source is not None
    tree, site = staging / "tree", staging / "site"
    base = staging / "base" if layer else tree

    async def install() -> None:
        await extract_tree(tools, base_tar, base)
        await install_wheels(tools, base, site, source)
        await compile_python(tools, base, {site: f"/{site_of(base)}"})

    if layer is None:
        await install()
    else:
        _, layer_tar = await both(install, layer)
        await anyio.to_thread.run_sync(remove_tree, base)
        await extract_tree(tools, layer_tar, tree)
    prepare_tree(tree)
    link_in(tree, PYTHON.lstrip("/"), "/usr/bin/python3")
    add_to_tree(site, tree)
    remove_tree(site)
    libraries = (f"usr/lib/{guest_python(tree).name}", "usr/lib/python3")
    await compile_python(tools, tree, {tree / name: f"/{name}" for name in libraries})
    for command in source.finish:
        private = Private(staging / "scratch", (tree,), subordinate_ids=False)
        await tools.run(["sh", "-ec", _IN_TREE, "sh", str(tree), command], private=private, env={"HOME": "/root"})
    installed = installed_wheels(tree)
    await _finish(tools, tree, staging)
    return {"template": template.name, "wheels": installed}


async def make_layered_image(
    tools: Tools, staging: Path, layers_tar: Path, interpreter: Path, details: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `staging`/root.erofs: the layers, an account for user code, and the agent's Python.

    No code of the image runs. `details` describe the layers; the image keeps them.
    """
    tree = staging / "tree"
    tools.note("unpacking the layers")
    await extract_tree(tools, layers_tar, tree)
    prepare_tree(tree)
    tools.note("adding the agent's Python")
    target = clear_path_in(tree, str(Path(PYTHON).parent).lstrip("/"))
    await anyio.to_thread.run_sync(shutil.copytree, interpreter, target)
    await _finish(tools, tree, staging)
    return dict(details)


async def _finish(tools: Tools, tree: Path, staging: Path) -> None:
    tools.note("packing the image")
    await anyio.to_thread.run_sync(make_readable, tree)
    await pack_tree(tools, tree, staging / IMAGE)
    await anyio.to_thread.run_sync(remove_tree, tree)


async def extract_tree(tools: Tools, base_tar: Path, tree: Path) -> None:
    """Unpack a base. Ordinary users can do it: all files become theirs."""
    require_free(tree.parent, 2 * base_tar.stat().st_size, "the image")  # its files, which are packed later
    tree.mkdir()
    options = ("--no-same-owner", "--same-permissions")
    await tools.run(["tar", "--extract", *options, f"--file={base_tar}", f"--directory={tree}"])


def prepare_tree(tree: Path) -> None:
    """Add the account for user code and remove traces of the host. The tree may be untrusted."""
    shell = "/bin/bash" if resolve_in(tree, "bin/bash").is_file() else "/bin/sh"
    for name, lines in _ACCOUNTS.items():
        write_in(tree, name, _with_account(read_in(tree, name), *(line.format(shell=shell) for line in lines)))
    for name, text in _NEUTRAL.items():
        write_in(tree, name, text)
    for name, target in _IDENTITY.items():
        link_in(tree, name, target)
    remove_in(tree, "etc/apt/sources.list")  # names the host's mirror
    for name, mode in _MOUNT_POINTS.items():
        mount_point_in(tree, name, mode)


def _with_account(text: str, sandbox: str, root: str) -> str:
    """Return an account file with the sandbox account before all others of the same id: the first one wins."""
    lines = [line for line in text.splitlines() if not line.startswith("sandbox:")] or [root]
    same = [line for line in lines if line.split(":")[_ID_FIELD : _ID_FIELD + 1] == [str(SANDBOX_UID)]]
    return "".join(f"{line}\n" for line in (*(line for line in lines if line not in same), sandbox, *same))


def make_readable(tree: Path) -> None:
    """Let everyone read all files and run all programs, and clear set-user-id bits, regardless of the umask.

    An image has no secrets, and machines run as other users. The host must not keep set-user-id programs either.
    """
    for path, mode in _modes(tree):
        executable = stat.S_ISDIR(mode) or mode & stat.S_IXUSR
        wanted = mode & 0o1777 | stat.S_IWUSR | 0o444 | (0o111 if executable else 0)
        if stat.S_IMODE(mode) != wanted:  # nearly all are as they should be
            Path(path).chmod(wanted)


async def pack_tree(tools: Tools, tree: Path, image: Path) -> None:
    """Pack a tree into an erofs file, uncompressed: decompression is slow in emulated machines.

    File tails are not inlined, because gVisor cannot map inlined data. Modification times are kept, because Python
    checks them before it uses a compiled file.
    """
    await tools.run(["mkfs.erofs", "--quiet", "--all-root", "-E", "noinline_data", "-U", _UUID, str(image), str(tree)])
    image.chmod(READABLE)


def tree_inputs(image_id: str) -> dict[str, Any]:
    """Return the inputs of a tree. `image_id` differs between two builds of the same image."""
    return {"recipe": TREE_RECIPE, "image": image_id}


async def make_tree(tools: Tools, staging: Path, template: Template, image: Path) -> dict[str, Any]:
    """Unpack an image into `staging`/root, for drivers that cannot mount an image."""
    options = ("--preserve-perms", "--no-preserve-owner")  # ordinary users cannot change owners
    await tools.run(["fsck.erofs", f"--extract={staging / TREE}", *options, str(image)])
    await anyio.to_thread.run_sync(_deny_writing, staging / TREE)
    return {"template": template.name}


def _deny_writing(tree: Path) -> None:
    """Let only the owner write. Machines share the tree: a file that another host user put into its /tmp would show up
    in all of them. Drivers mount a private /tmp over it."""
    for path, mode in _modes(tree):
        if mode & 0o022:
            Path(path).chmod(mode & 0o755)


def _modes(tree: Path) -> Iterator[tuple[str, int]]:
    """Yield every directory and file with its mode, except symbolic links."""
    for folder, _, files in os.walk(tree):
        for path in (folder, *(f"{folder}/{name}" for name in files)):  # Path is slow for ten thousands of files
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode):
                yield path, mode
