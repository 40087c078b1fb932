"""Open files that are executed, booted or obeyed: nobody but this user and root may be able to change them."""

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from vmm.errors import Untrusted

PRIVATE_DIR = 0o700
FOR_OTHERS = 0o077
ROOT = 0
STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not wait for a writer


def open_trusted(path: Path) -> int:
    """Return a descriptor of a file or directory that no other user could have changed or replaced.

    Each directory from the root down is opened relative to the one before it and checked, then the file itself. So the
    descriptor belongs to the file that was checked, whatever happens to the path meanwhile.

    Raises:
        Untrusted: another user could have.
        OSError: it cannot be opened.
    """
    *folders, last = Path(os.path.realpath(path, strict=True)).parts
    place = Path()
    directory: int | None = None
    try:
        for name in folders:
            directory, previous = os.open(name, STEP, dir_fd=directory), directory
            if previous is not None:
                os.close(previous)
            place /= name
            _check(place, os.fstat(directory), passing=True)
        file = os.open(last, READ, dir_fd=directory)
    finally:
        if directory is not None:
            os.close(directory)
    try:
        _check(place / last, os.fstat(file), passing=False)
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def trusted(path: Path) -> Iterator[int]:
    """Open a file or directory as `open_trusted` does, for as long as the block lasts."""
    file = open_trusted(path)
    try:
        yield file
    finally:
        os.close(file)


def check_trusted(path: Path) -> None:
    """Raise Untrusted if another user could have changed or replaced a file or directory."""
    with trusted(path):
        pass


def read_trusted(path: Path) -> bytes:
    """Return the content of a file; raise Untrusted if another user could have changed it."""
    with open(open_trusted(path), "rb") as file:
        return file.read()


def make_private(directory: Path) -> bool:
    """Close a directory to other users if it exists; return whether it was open to them.

    Raises:
        Untrusted: other users could have changed what is in it.
    """
    with suppress(FileNotFoundError), trusted(directory) as file:
        status = os.fstat(file)
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()  # else root's, for all users to read
        if ours and status.st_mode & FOR_OTHERS:
            with _unless_read_only():  # then nothing private will be written to it
                os.fchmod(file, PRIVATE_DIR)
                return True
    return False


@contextmanager
def _unless_read_only() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def _check(path: Path, status: os.stat_result, *, passing: bool) -> None:
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise Untrusted(f"{path} is neither a file nor a directory", fix="remove it")
    if status.st_uid not in _owners(os.geteuid()):
        fix = "use a directory of your own, or change the owner if you trust what is in it"
        raise Untrusted(f"{path} belongs to another user, {_name(status.st_uid)}", fix=fix)
    if passing and status.st_mode & stat.S_ISVTX:  # as in /tmp: nobody can replace the files of others
        return
    by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    if by_group or status.st_mode & stat.S_IWOTH:
        fix = f"make sure that you trust what is in it, then run: chmod go-w {path}"
        raise Untrusted(f"{path} can be changed by other users", fix=fix)


@cache
def _owners(user: int) -> frozenset[int]:
    """Return whose files a user trusts. In a user namespace without root, root's files belong to the overflow uid."""
    owners = {user, ROOT}
    with suppress(OSError):
        maps = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if not any(first <= ROOT < first + count for first, _, count in maps):
            owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(owners)


def _is_own_group(group: int) -> bool:
    """Return whether this user is the only member of a group: many systems create one for each user."""
    with suppress(KeyError):
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
    return False


def _name(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)
