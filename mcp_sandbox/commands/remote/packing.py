"""A directory of this host as a tar archive, made while it is sent. Only files and directories are in it."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from mcp_sandbox.commands.remote.client import CHUNK_BYTES
from mcp_sandbox.commands.remote.errors import CannotCopy
from mcp_sandbox.sandboxes import tar_stream

REGULAR = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a name may have become a link or a FIFO since it was listed


class Packing:
    """The archive of a directory, and how many files have been in it."""

    def __init__(self, source: Path) -> None:
        self.source = source.resolve()  # it may be a link itself
        self.files = 0

    def size(self) -> int:
        """Return how many bytes the files have now."""
        return sum(_file_size(name, folder) or 0 for _, name, folder in self._found() if name is not None)

    def parts(self, advanced: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the archive, and report how many bytes of files are read.

        Raises:
            CannotCopy: something cannot be read, or has a name that no sandbox can have.
        """
        for below, name, folder in self._found():
            if name is None:
                if below.name:
                    yield tar_stream.header(f"{_sendable(below)}/", None, os.fstat(folder).st_mtime)
                continue
            yield from self._file(_sendable(below / name), name, folder, advanced)
        yield tar_stream.END

    def _found(self) -> Iterator[tuple[PurePosixPath, str | None, int]]:
        """Yield every directory, then its regular files: where it is, the file's name, the directory's descriptor.

        Descriptors, not paths: nobody can put a link in the way meanwhile, which could lead to files that nobody meant.
        """
        for path, _, names, folder in os.fwalk(self.source, onerror=_unreadable):
            below = PurePosixPath(Path(path).relative_to(self.source))
            yield below, None, folder
            for name in sorted(names):
                if _file_size(name, folder) is not None:
                    yield below, name, folder

    def _file(self, path: str, name: str, folder: int, advanced: Callable[[int], None]) -> Iterator[bytes]:
        try:
            descriptor = os.open(name, REGULAR, dir_fd=folder)
        except OSError as error:
            raise CannotCopy(f"{self.source / path} cannot be read: {error.strerror}.") from error
        with os.fdopen(descriptor, "rb") as content:
            about = os.fstat(content.fileno())
            left = about.st_size  # as many bytes as the header announces
            yield tar_stream.header(path, left, about.st_mtime)
            while left and (part := content.read(min(CHUNK_BYTES, left))):
                left -= len(part)
                yield part
                advanced(len(part))
            if left:
                raise CannotCopy(f"{self.source / path} became shorter while it was copied.")
            yield tar_stream.padding(about.st_size)
        self.files += 1


def _file_size(name: str, folder: int) -> int | None:
    """Return the size of a regular file; None if it is none, or is gone."""
    try:
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return about.st_size if stat.S_ISREG(about.st_mode) else None


def _sendable(path: PurePosixPath) -> str:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CannotCopy(f"{str(path)!a} has a name that is not UTF-8. Rename it.") from None
    return str(path)


def _unreadable(error: OSError) -> None:
    raise CannotCopy(f"{error.filename} cannot be read: {error.strerror}.") from error
