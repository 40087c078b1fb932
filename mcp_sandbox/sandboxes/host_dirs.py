"""Files in directories of the host that the operator opened. Nothing outside of them is reached.

Every path is walked from the directory down, by descriptor and without following links, so no rename or link can lead
out of it. All functions here block: call them in a thread.
"""

# pathlib knows no directory descriptors
# ruff: noqa: PTH104, PTH208

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from guest.client.wire import one_line
from mcp_sandbox.config import HostDir
from mcp_sandbox.errors import BadRequest, HostDirNotFound, HostDirReadOnly, HostFileFailed

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_NAME_BYTES = 255  # of one part of a path, as file systems have it
SHOWN_NAMES = 20  # of a directory in an error
MAX_SHOWN_CHARS = 600
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)  # of a file system without hard links
LINK = "it is a link, and links are not followed"

_REASONS = {
    errno.ENOENT: "it does not exist",
    errno.EACCES: "the server may not access it",
    errno.EPERM: "the server may not access it",
    errno.ELOOP: LINK,
    errno.EISDIR: "it is a directory",
    errno.ENOSPC: "the host's disk is full",
    errno.EDQUOT: "the host's disk quota is used up",
    errno.EFBIG: "it is too large for the host's file system",
    errno.EROFS: "its file system is read-only",
    errno.ENAMETOOLONG: "the name is too long",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A path as callers write it: `data/2024/sales.csv`."""

    folder: HostDir
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return "/".join((self.folder.name, *self.parts))

    @property
    def name(self) -> str:
        """The last part."""
        return self.parts[-1] if self.parts else self.folder.name

    def below(self, name: str) -> "Place":
        """Return the place of a file in this directory."""
        return Place(self.folder, (*self.parts, name))

    def failed(self, error: OSError) -> HostFileFailed:
        """Return what to tell a caller, without the host's own paths."""
        return HostFileFailed(str(self), _REASONS.get(error.errno or 0) or (error.strerror or "it failed"))


class Found(NamedTuple):
    """What is at a place."""

    is_folder: bool
    size: int
    mtime: float


def find_place(dirs: Sequence[HostDir], path: str, *, writing: bool = False) -> Place:
    """Return the place of a path.

    Raises:
        BadRequest, HostDirNotFound, HostDirReadOnly: as their names say.
    """
    name, *parts = path.strip("/").split("/")
    folder = next((each for each in dirs if each.name == name), None)
    if folder is None:
        raise HostDirNotFound(one_line(name, 60), [each.name for each in dirs])
    if not all(map(_is_name, parts)):
        raise BadRequest(f"{one_line(path, 200)!r} is no path on the host: write it like {name}/file.csv.")
    if writing and not folder.writable:
        raise HostDirReadOnly(name)
    return Place(folder, tuple(parts))


def _is_name(part: str) -> bool:
    """Return whether a part of a path can be a file's name. None leads up."""
    raw = part.encode(errors="replace")
    return (
        part not in ("", ".", "..")
        and "\0" not in part
        and raw == part.encode(errors="ignore")
        and len(raw) <= MAX_NAME_BYTES
    )


@contextmanager
def opened_folder(place: Place) -> Iterator[int]:
    """Open the directory at a place. Raises HostFileFailed."""
    done = Place(place.folder, ())
    try:
        fd = os.open(place.folder.path, FOLDER & ~os.O_NOFOLLOW)  # the operator's own path may have links
    except OSError as error:
        raise done.failed(error) from error
    try:
        for part in place.parts:
            inner = _step(fd, done, part)
            os.close(fd)
            fd, done = inner, done.below(part)
        yield fd
    finally:
        os.close(fd)


def _step(fd: int, folder: Place, name: str) -> int:
    try:
        return os.open(name, FOLDER, dir_fd=fd)
    except OSError as error:
        raise _explained(fd, folder, name, error) from error


def _explained(fd: int, folder: Place, name: str, error: OSError) -> HostFileFailed:
    """Say what is in the way, or which names there are."""
    place = folder.below(name)
    if error.errno == errno.ENOENT:
        return HostFileFailed(str(place), f"it does not exist; {folder} has {_names(fd)}")
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        with suppress(OSError):
            is_link = stat.S_ISLNK(os.lstat(name, dir_fd=fd).st_mode)
            return HostFileFailed(str(place), LINK if is_link else "it is a file, not a directory")
    return place.failed(error)


def _names(fd: int) -> str:
    try:
        names = sorted(os.listdir(fd))
    except OSError:
        return "files that cannot be listed"
    shown = one_line(", ".join(names[:SHOWN_NAMES]), MAX_SHOWN_CHARS)
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{shown}{more}" if names else "no files"


def look_up(place: Place) -> Found:
    """Return what is at a place: a regular file or a directory. Raises HostFileFailed."""
    if not place.parts:
        with opened_folder(place):
            return Found(is_folder=True, size=0, mtime=0)
    parent = Place(place.folder, place.parts[:-1])
    with opened_folder(parent) as fd:
        try:
            facts = os.lstat(place.name, dir_fd=fd)
        except OSError as error:
            raise _explained(fd, parent, place.name, error) from error
    if stat.S_ISLNK(facts.st_mode):
        raise HostFileFailed(str(place), LINK)
    if not stat.S_ISDIR(facts.st_mode) and not stat.S_ISREG(facts.st_mode):
        raise HostFileFailed(str(place), "it is neither a file nor a directory")
    return Found(stat.S_ISDIR(facts.st_mode), facts.st_size, facts.st_mtime)


def list_folder(place: Place) -> list[str]:
    """Return the names in a directory. Raises HostFileFailed."""
    with opened_folder(place) as fd:
        try:
            return sorted(os.listdir(fd))
        except OSError as error:
            raise place.failed(error) from error


def open_file(place: Place) -> int:
    """Open a regular file for reading. Raises HostFileFailed."""
    look_up(place)  # before: opening a device can have effects
    with opened_folder(Place(place.folder, place.parts[:-1])) as folder:
        try:
            fd = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            raise place.failed(error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise HostFileFailed(str(place), "it is not a regular file")
    return fd


class NewFile:
    """A file under a temporary name, until `put` gives it its own. `discard` leaves nothing."""

    def __init__(self, place: Place, *, overwrite: bool) -> None:
        self._place, self._overwrite = place, overwrite
        self._temporary = f".{secrets.token_hex(8)}.part"
        with opened_folder(Place(place.folder, place.parts[:-1])) as folder:
            self._check(folder)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(self._temporary, flags, 0o600, dir_fd=folder)
            except OSError as error:
                raise place.failed(error) from error
            with suppress(OSError):  # some file systems have no modes
                os.fchmod(self._fd, os.fstat(folder).st_mode & 0o666)  # as open to others as the directory is
            self._folder = os.dup(folder)

    def _check(self, folder: int) -> None:
        """Refuse early, and not after the whole copy."""
        try:
            facts = os.lstat(self._place.name, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._place.failed(error) from error
        else:
            if stat.S_ISDIR(facts.st_mode):
                raise HostFileFailed(str(self._place), "it is a directory; name a file in it")
            if not self._overwrite:
                raise self._exists()

    def _exists(self) -> HostFileFailed:
        return HostFileFailed(str(self._place), "it exists already; choose another name, or set overwrite")

    def write(self, data: bytes) -> None:
        """Add data. Raises HostFileFailed."""
        part = memoryview(data)
        try:
            while part:
                part = part[os.write(self._fd, part) :]
        except OSError as error:
            raise self._place.failed(error) from error

    def put(self) -> None:
        """Give the file its name. Raises HostFileFailed."""
        ends = {"src_dir_fd": self._folder, "dst_dir_fd": self._folder}
        try:
            os.fsync(self._fd)
            if self._overwrite or not self._linked():
                os.rename(self._temporary, self._place.name, **ends)
        except FileExistsError as error:
            raise self._exists() from error
        except OSError as error:
            raise self._place.failed(error) from error

    def _linked(self) -> bool:
        """Give the file a second name unless that exists; False where files can have only one."""
        try:
            os.link(self._temporary, self._place.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._check(self._folder)
            return False
        return True

    def discard(self) -> None:
        """Remove the temporary name, if it is still there."""
        with suppress(FileNotFoundError):
            os.unlink(self._temporary, dir_fd=self._folder)
        os.close(self._fd)
        os.close(self._folder)
