"""Build an image from a template's Dockerfile with buildah, without a daemon; only the image is kept."""

import hashlib
import os
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates.container_tools import run_container_tool
from templates.model import Template
from templates.oci import file_digest, unpack_image
from templates.removal import remove_tree
from templates.tools import Tools

RECIPE = 1  # part of the cache key: raise it when a change here requires a rebuild
# Not part of the image: a new warm-up must not rebuild it.
NOT_IN_CONTEXT = "template.toml"
IGNORE_FILES = (".containerignore", ".dockerignore")  # the first that exists is used, as in buildah


def dockerfile_inputs(template: Template) -> dict[str, Any]:
    """Return the inputs of an image: all files beside its Dockerfile. Tags in it are resolved when it is built."""
    context = hashlib.sha256()
    for folder, folders, files in os.walk(template.folder):
        folders.sort()
        for path in (Path(folder, name) for name in sorted((*files, *folders))):
            if path != template.folder / NOT_IN_CONTEXT:
                context.update(repr((str(path.relative_to(template.folder)), *_fingerprint(path))).encode())
    return {
        "recipe": RECIPE,
        "template": template.name,
        "dockerfile": template.source.dockerfile,
        "context": context.hexdigest(),
    }


async def make_dockerfile(tools: Tools, staging: Path, template: Template) -> dict[str, Any]:
    """Write `staging`/layers.tar: the built image.

    RUN commands run in a chroot, with the host's network and proxy variables.
    """
    assert template.source.dockerfile is not None
    storage, built = staging / "storage", staging / "built"
    ignore = staging / "ignore"
    ignore.write_text(_ignore_rules(template.folder))
    keep = ("--root", str(storage / "root"), "--runroot", str(storage / "run"), "--storage-driver", "vfs")
    build = (
        *("build", "--isolation", "chroot", "--layers=false", "--format", "oci"),
        *("--ignorefile", str(ignore), "--file", str(template.folder / template.source.dockerfile)),
        *("--tag", f"oci:{built}:image", str(template.folder)),
    )
    await run_container_tool(tools, staging, "buildah", *keep, *build, visible=(template.folder,))
    await anyio.to_thread.run_sync(remove_tree, storage)
    details = await unpack_image(tools, staging, template, f"oci:{built}:image")
    await anyio.to_thread.run_sync(remove_tree, built)
    ignore.unlink()
    return details


def _fingerprint(path: Path) -> tuple[int, str]:
    """Return what an image could take over from a file. If it cannot be read, buildah will report it."""
    try:
        status = path.lstat()
        if path.is_symlink():
            return 0, str(path.readlink())
        if not path.is_file():
            return status.st_mode, ""
        return status.st_mode, file_digest(path, (status.st_ino, status.st_mtime_ns, status.st_size))
    except OSError as error:
        return 0, f"unreadable: {error.strerror}"


def _ignore_rules(folder: Path) -> str:
    """Return the ignore rules of the template's author, and ours."""
    theirs = next((folder / name for name in IGNORE_FILES if (folder / name).is_file()), None)
    return f"{theirs.read_text() if theirs else ''}\n{NOT_IN_CONTEXT}\n"
