"""Removes trees that strangers have filled: the files of images, and what builds of them leave."""

import os
import secrets
from contextlib import suppress
from itertools import count
from pathlib import Path


def remove_tree(tree: Path) -> None:
    """Remove a directory and all in it, as far as we may; it can be gone already.

    It can be deeper than calls can be nested, files be open, or paths be long. So every directory is moved up to the
    top before it is looked into; what is mounted on one cannot be moved, and stays what it is.
    """
    mark, numbers = secrets.token_hex(4), count()
    waiting = [tree]
    while waiting:
        folder = waiting.pop()
        for entry in _opened(folder):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path).rename(tree / f"{mark}-{next(numbers)}"))
                else:
                    Path(entry.path).unlink()
        if folder != tree:
            with suppress(OSError):
                folder.rmdir()
    with suppress(OSError):
        tree.rmdir()


def _opened(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a directory, whatever its modes were."""
    with suppress(OSError):
        folder.chmod(0o700)
        with os.scandir(folder) as found:
            return list(found)
    return []
