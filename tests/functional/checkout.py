"""The tests' own code and interpreter, as processes of other users see them.

A checkout may lie anywhere: in /tmp, in a path with spaces, below a home that only its owner may enter. If it was
cloned under a strict umask, its files are closed to other users, too.
"""

import os
import shutil
import stat
import sys
from functools import cache
from pathlib import Path

from tests.session import current

REPO = Path(__file__).absolute().parents[2]
_LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache")


def folders() -> list[Path]:
    """The directories besides /usr that tests run from."""
    every = {Path(path) for path in (sys.base_prefix, sys.prefix, REPO)} - {Path("/")}
    system = Path("/usr")
    return sorted(path for path in every if not any(path.is_relative_to(other) for other in {*every, system} - {path}))


@cache
def readable(folder: Path) -> Path:
    """`folder` itself, or a copy of it if some of its files are closed to other users. The session removes the copy."""
    if _is_open(folder):
        return folder
    copy = current().root / f"readable{len(list(current().root.glob('readable*')))}" / folder.name
    shutil.copytree(folder, copy, symlinks=True, ignore=_LEFT_OUT)
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() or path.stat().st_mode & 0o100 else 0o044))
    return copy


def _is_open(folder: Path) -> bool:
    """Whether other users can read everything in it that tests may need."""
    for parent, directories, files in os.walk(folder):
        left_out = _LEFT_OUT(parent, [*directories, *files])
        directories[:] = [name for name in directories if name not in left_out]
        for name in (".", *(name for name in files if name not in left_out)):
            mode = Path(parent, name).lstat().st_mode
            if not stat.S_ISLNK(mode) and not mode & 0o004:
                return False
    return True
