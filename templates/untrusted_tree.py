"""Work on a directory tree whose contents come from an untrusted image.

A symbolic link in such a tree means something else on the host than in the machine: /etc may point to the host's own
/etc. So links are resolved as a machine with that root would, and nothing in the tree is opened by its plain path.
"""

from pathlib import Path, PurePosixPath

from templates.removal import remove_tree
from templates.tools import StepFailed

MAX_LINKS = 40  # as in Linux


def resolve_in(tree: Path, name: str) -> Path:
    """Resolve `name` as a machine whose root is `tree` would; the last part may be missing."""
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
            raise StepFailed(f"the image has too many symbolic links at /{name.lstrip('/')}")
        left += reversed(PurePosixPath(path.readlink()).parts)
    return found


def read_in(tree: Path, name: str) -> str:
    """Return the text of a file; empty if it is missing or not a regular file."""
    path = resolve_in(tree, name)
    return path.read_text(errors="surrogateescape") if path.is_file() else ""


def write_in(tree: Path, name: str, text: str) -> None:
    """Replace whatever has this name with a new file: the old one may be hard-linked under other names."""
    path = clear_path_in(tree, name)
    with path.open("x", errors="surrogateescape") as file:
        file.write(text)
    path.chmod(0o644)


def link_in(tree: Path, name: str, target: str) -> None:
    """Replace whatever has this name with a symbolic link."""
    clear_path_in(tree, name).symlink_to(target)


def mount_point_in(tree: Path, name: str, mode: int) -> None:
    """Make sure that `name` is a real directory: a mount on a symbolic link would end up elsewhere."""
    folder, _, last = name.rpartition("/")
    path = _directory_in(tree, folder) / last
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir()
    path.chmod(mode)


def remove_in(tree: Path, name: str) -> None:
    """Remove a file if it exists."""
    path = resolve_in(tree, name.rpartition("/")[0]) / name.rpartition("/")[2]
    if path.is_symlink() or path.is_file():
        path.unlink()


def clear_path_in(tree: Path, name: str) -> Path:
    """Remove whatever has this name, create its parent directories, and return the free path."""
    folder, _, last = name.rpartition("/")
    path = _directory_in(tree, folder) / last
    remove_tree(path)
    return path


def _directory_in(tree: Path, name: str) -> Path:
    """Return a directory of the tree. Create it if it is missing; replace anything that is not a directory."""
    path = resolve_in(tree, name)
    if path == tree:
        return tree
    if not path.is_dir():
        _directory_in(tree, str(path.parent.relative_to(tree)))
        path.unlink(missing_ok=True)
        path.mkdir()
    return path
