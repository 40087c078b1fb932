"""Images built from a template's own Dockerfile with buildah: no daemon, and nothing kept but the image."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from templates.container_tools import run_container_tool
from templates.model import Template
from templates.oci import file_digest, unpack_image
from templates.removal import remove_tree
from templates.tools import Tools

RECIPE = 1  # raise it when a change here must reach machines that are already built
# It is about the sandbox and not part of the image: a new warm-up must not mean a new build.
NOT_IN_CONTEXT = "template.toml"
IGNORE_FILES = (".containerignore", ".dockerignore")  # the first that is there counts, as buildah has it


def dockerfile_inputs(template: Template) -> dict[str, Any]:
    """What an image depends on: all beside its Dockerfile. Where tags in that lead is found out when it is built."""
    context = hashlib.sha256()
    for folder, folders, files in os.walk(template.folder):
        folders.sort()
        for path in (Path(folder, name) for name in sorted((*files, *folders))):
            if path != template.folder / NOT_IN_CONTEXT:
                context.update(repr((str(path.relative_to(template.folder)), *_about(path))).encode())
    return {
        "recipe": RECIPE,
        "template": template.name,
        "dockerfile": template.source.dockerfile,
        "context": context.hexdigest(),
    }


async def make_dockerfile(tools: Tools, staging: Path, template: Template) -> dict[str, Any]:
    """Build the image into `staging`/layers.tar.

    Its commands run in a chroot, with the network of this host and the proxies of its environment.
    """
    assert template.source.dockerfile is not None
    storage, built = staging / "storage", staging / "built"
    ignore = staging / "ignore"
    ignore.write_text(_ignored(template.folder))
    keep = ("--root", str(storage / "root"), "--runroot", str(storage / "run"), "--storage-driver", "vfs")
    build = (
        *("build", "--isolation", "chroot", "--layers=false", "--format", "oci"),
        *("--ignorefile", str(ignore), "--file", str(template.folder / template.source.dockerfile)),
        *("--tag", f"oci:{built}:image", str(template.folder)),
    )
    try:
        await run_container_tool(tools, staging, "buildah", *keep, *build)
    finally:
        with anyio.CancelScope(shield=True):
            await _remove(tools, staging, storage)
    details = await unpack_image(tools, staging, template, f"oci:{built}:image")
    await anyio.to_thread.run_sync(shutil.rmtree, built)
    ignore.unlink()
    return details


def _about(path: Path) -> tuple[int, str]:
    """All of a file that an image could have from it. One that cannot be read is for buildah to complain about."""
    try:
        status = path.lstat()
        if path.is_symlink():
            return 0, str(path.readlink())
        if not path.is_file():
            return status.st_mode, ""
        return status.st_mode, file_digest(path, (status.st_ino, status.st_mtime_ns, status.st_size))
    except OSError as error:
        return 0, f"unreadable: {error.strerror}"


def _ignored(folder: Path) -> str:
    """What the template's author wants to be left out, and what we do."""
    own = next((folder / name for name in IGNORE_FILES if (folder / name).is_file()), None)
    return f"{own.read_text() if own else ''}\n{NOT_IN_CONTEXT}\n"


async def _remove(tools: Tools, staging: Path, storage: Path) -> None:
    """Files in an ordinary user's storage belong to ids that only buildah can act as."""
    if os.geteuid() == 0:
        await anyio.to_thread.run_sync(remove_tree, storage)
    elif storage.exists():
        await run_container_tool(tools, staging, "buildah", "unshare", "rm", "-rf", str(storage))
