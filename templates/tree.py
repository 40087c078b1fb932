"""From a template's image to the same files in a directory, for drivers that cannot mount an image."""

import os
import stat
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates.model import Template
from templates.tools import Tools

TREE = "root"
RECIPE = 1  # raise it when a change here must reach machines that are already built


def tree_inputs(image_id: str) -> dict[str, Any]:
    """What a tree depends on; `image_id` tells two makings of the same image apart."""
    return {"recipe": RECIPE, "image": image_id}


async def make_tree(tools: Tools, staging: Path, template: Template, image: Path) -> dict[str, Any]:
    """Unpack an image into `staging`/root, with the modes it has there: machines run as users of their own."""
    options = ("--preserve-perms", "--no-preserve-owner")  # ordinary users cannot give files away
    await tools.run(["fsck.erofs", f"--extract={staging / TREE}", *options, str(image)])
    await anyio.to_thread.run_sync(close_to_writers, staging / TREE)
    return {"template": template.name}


def close_to_writers(tree: Path) -> None:
    """Let nobody but its owner write anything: what another user of the host left in the tree's /tmp would be in every
    machine. Drivers mount a /tmp of each machine's own over it."""
    for folder, _, files in os.walk(tree):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & 0o022:
                path.chmod(mode & 0o755)
