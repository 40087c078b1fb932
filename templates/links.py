"""Names in a tree that a stranger has filled: every link of it is followed as a machine would follow it.

What a link says means something else on this host than in the machine: /etc may lead to the host's own. So nothing of
such a tree is opened or made by a plain path.
"""

import shutil
from pathlib import Path, PurePosixPath

from templates.tools import StepFailed

MAX_LINKS = 40  # as Linux does


def inside(tree: Path, name: str) -> Path:
    """Where a machine whose root is `tree` finds `name`, links in it followed; the last part may be missing."""
    found, links = tree, 0
    left = list(reversed(PurePosixPath(name).parts))
    while left:
        part = left.pop()
        if part in ("/", ".."):
            found = tree if part == "/" or found == tree else found.parent
            continue
        path = found / part
        if not path.is_symlink():
            found = path
            continue
        links += 1
        if links > MAX_LINKS:
            raise StepFailed(f"the image's /{name.lstrip('/')} is a link that leads nowhere")
        left += reversed(PurePosixPath(path.readlink()).parts)
    return found


def folder_in(tree: Path, name: str) -> Path:
    """A directory of the machine, made if it is missing; a link is followed, and anything else makes way for it."""
    path = inside(tree, name)
    if path == tree:
        return tree
    if not path.is_dir():
        folder_in(tree, str(path.parent.relative_to(tree)))
        path.unlink(missing_ok=True)
        path.mkdir()
    return path


def read_in(tree: Path, name: str) -> str:
    """What a file of the machine says; nothing if it is no plain file."""
    path = inside(tree, name)
    return path.read_text(errors="surrogateescape") if path.is_file() else ""


def write_in(tree: Path, name: str, text: str) -> None:
    """Put a file into its place, whatever was there: a new one, for the old may have other names."""
    path = vacated_in(tree, name)
    with path.open("x", errors="surrogateescape") as file:
        file.write(text)
    path.chmod(0o644)


def link_in(tree: Path, name: str, target: str) -> None:
    """Put a link into its place, whatever was there."""
    vacated_in(tree, name).symlink_to(target)


def mount_point_in(tree: Path, name: str, mode: int) -> None:
    """A true directory: what is mounted on a link would be somewhere else."""
    folder, _, last = name.rpartition("/")
    path = folder_in(tree, folder) / last
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir()
    path.chmod(mode)


def remove_in(tree: Path, name: str) -> None:
    """Take a file away; none may be there."""
    path = inside(tree, name.rpartition("/")[0]) / name.rpartition("/")[2]
    if path.is_symlink() or path.is_file():
        path.unlink()


def vacated_in(tree: Path, name: str) -> Path:
    """A free place in a true directory, whatever was there."""
    folder, _, last = name.rpartition("/")
    path = folder_in(tree, folder) / last
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path
