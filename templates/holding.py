"""Things in the store that are in use: machines stand on them, so nobody may remove them."""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path


@contextmanager
def held(entries: Iterable[Path]) -> Iterator[None]:
    """Keep finished things where they are for as long as the block lasts. No process can remove them meanwhile, and one
    that is killed holds nothing any more.

    Raises:
        FileNotFoundError: one of them is gone, or going.
    """
    with ExitStack() as stack:
        for path in entries:
            try:
                stack.enter_context(_locked_directory(path, fcntl.LOCK_SH))
            except BlockingIOError:
                raise FileNotFoundError(errno.ENOENT, "it is being removed", str(path)) from None
        yield


def alone(path: Path) -> AbstractContextManager[None]:
    """Nobody else holds a thing, and nobody can; raises BlockingIOError or FileNotFoundError."""
    return _locked_directory(path, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether somebody holds a thing now."""
    try:
        with alone(path):
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


@contextmanager
def _locked_directory(path: Path, how: int) -> Iterator[None]:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        if not is_at(file, path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(file)


def is_at(file: int, path: Path) -> bool:
    """Whether what is open is still what has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
