"""Shared locks on store entries: an entry that a machine was started from cannot be removed while the machine lives.

The lock is a `flock` on the entry's directory, so it ends with the process that holds it, even after SIGKILL.
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path


@contextmanager
def hold(entries: Iterable[Path]) -> Iterator[None]:
    """Keep every process from removing these entries.

    Raises:
        FileNotFoundError: one of them is gone or is being removed.
    """
    with ExitStack() as stack:
        for path in entries:
            try:
                stack.enter_context(_locked_directory(path, fcntl.LOCK_SH))
            except BlockingIOError:
                raise FileNotFoundError(errno.ENOENT, "it is being removed", str(path)) from None
        yield


def exclusive(path: Path) -> AbstractContextManager[None]:
    """Lock an entry against all other holders; raises BlockingIOError or FileNotFoundError."""
    return _locked_directory(path, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether any process holds an entry now."""
    try:
        with exclusive(path):
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


@contextmanager
def _locked_directory(path: Path, operation: int) -> Iterator[None]:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
        if not same_file(file, path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(file)


def same_file(file: int, path: Path) -> bool:
    """Whether `path` still names the open file. After waiting for a lock, check it: the path may have been replaced."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
