"""Remove directory trees without following a link, even one that is swapped in while the removal runs."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from vmm.process import probe_child

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# An ordinary user's builds leave files of subordinate ids, which only root of such a namespace can remove. Like the
# removal here, rm works by descriptors.
_AS_SUBORDINATES = ("unshare", "--map-root-user", "--map-auto", "rm", "--recursive", "--force", "--one-file-system")


def remove_tree(path: Path) -> None:
    """Remove a directory with everything in it, or a file or link; it need not exist.

    Every step names an entry of an open directory, so nobody can redirect it by replacing a parent with a link. A mount
    point below `path` stays untouched.

    Raises:
        OSError: something could not be removed. The rest is gone.
    """
    try:
        _remove(path)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        with probe_child([*_AS_SUBORDINATES, "--", str(path.absolute())]) as child:
            if child.wait() != 0:
                raise


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError), _opened(os.open(path.parent, _DIRECTORY)) as parent:
        if _unlinked(path.name, parent):
            return
        with _opened(_open_directory(path.name, parent)) as top:
            _make_writable(top)
            error = _empty(top)
        if error is not None:
            raise error
        os.rmdir(path.name, dir_fd=parent)


def _empty(top: int) -> OSError | None:
    """Remove all entries of an open directory; return the first error.

    The tree may be nested deeper than recursion, open files or path lengths allow. So each directory is moved to the
    top before it is emptied. A mount point cannot be moved.
    """
    first: OSError | None = None
    prefix, numbers = secrets.token_hex(4), count()
    pending: list[str] = []

    def remove_entries(folder: int) -> None:
        nonlocal first
        for name in os.listdir(folder):
            try:
                with suppress(FileNotFoundError):
                    if not _unlinked(name, folder):
                        _move(name, folder, moved := f"{prefix}-{next(numbers)}", top)
                        pending.append(moved)
            except OSError as error:
                first = first or error

    remove_entries(top)
    while pending:
        name = pending.pop()
        try:
            with suppress(FileNotFoundError):
                with _opened(_open_directory(name, top)) as folder:
                    _make_writable(folder)
                    remove_entries(folder)
                os.rmdir(name, dir_fd=top)
        except OSError as error:
            first = first or error
    return first


def _unlinked(name: str, folder: int) -> bool:
    """Remove an entry unless it is a directory; return whether it was removed."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


def _move(name: str, folder: int, target: str, top: int) -> None:
    try:
        os.rename(name, target, src_dir_fd=folder, dst_dir_fd=top)
    except PermissionError:  # a directory that its owner may not write to can be moved only within its parent
        with _opened(_open_directory(name, folder)) as found:
            _make_writable(found)
        os.rename(name, target, src_dir_fd=folder, dst_dir_fd=top)


def _open_directory(name: str, folder: int) -> int:
    """Open a directory that its owner may not be allowed to read."""
    try:
        return os.open(name, os.O_RDONLY | _DIRECTORY, dir_fd=folder)
    except PermissionError:
        with _opened(os.open(name, os.O_PATH | _DIRECTORY, dir_fd=folder)) as found:
            os.chmod(f"/proc/self/fd/{found}", 0o700)  # noqa: PTH101 - fchmod refuses a descriptor without access
            return os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=found)


def _make_writable(folder: int) -> None:
    with suppress(PermissionError):  # another user's: then removing its entries fails, and that error counts
        os.fchmod(folder, 0o700)


@contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
