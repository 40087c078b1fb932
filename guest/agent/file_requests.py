"""Serves file requests: regular files only, in pieces, with the privileges of the sandbox's user."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH104, PTH108, PTH110, PTH112, PTH116, PTH118, PTH120

import errno
import os
import stat
from contextlib import suppress
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

from guest.agent.user import User
from guest.errors import RequestRefused
from guest.places import WORKSPACE
from guest.protocol import MAX_BODY, MAX_LISTING, encode_json
from guest.trees import make_folders

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_UPLOADS = 16  # half-sent files at once
MAX_ENTRIES = 5000  # looked at for one listing; the agent serves nothing else meanwhile
END_OF_FILES = 2**63  # bytes; no file is as long
WRITING = ("write", "make_folder")
COPY_BYTES = 1 << 20  # at a time, from an upload to the file it is appended to
LATEST = 2.0**36  # seconds, the year 4147; code can set later times, which no calendar has

Reply = tuple[dict[str, Any], bytes]

_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "is_directory",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "too_large",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
}


def refusal(error: OSError, path: str, *, writing: bool) -> RequestRefused:
    """Return the refusal for an operating system error, with what is in the way."""
    code = _CODES.get(error.errno or 0, "bad_request")
    if code == "not_a_directory":
        return RequestRefused(code, _file_in_the_way(path))
    if error.errno == errno.EROFS:
        return RequestRefused(code, "it is on a read-only file system")
    if error.errno == errno.EACCES:
        return RequestRefused(code, f"the sandbox's user may not {_forbidden(path, writing=writing)}")
    return RequestRefused(code, f"{path}: {error.strerror}")


def _file_in_the_way(path: str) -> str:
    """Return the first part of a path that is no directory."""
    while path != "/" and not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _forbidden(path: str, *, writing: bool) -> str:
    """Return what the user may not do of all that opening a file takes."""
    folder = os.path.dirname(path)
    parts = folder.split("/")
    for number in range(1, len(parts) + 1):
        parent = "/".join(parts[:number]) or "/"
        if not os.path.exists(parent):
            break
        if not os.access(parent, os.X_OK, effective_ids=True):
            return f"enter {parent}"
        folder = parent
    if writing and not os.access(folder, os.W_OK, effective_ids=True):
        return f"write to the directory {folder}"
    return f"{'write' if writing else 'read'} {path}"


class FileRequests:
    """Answers read, write, abandon, make_folder and list."""

    def __init__(self, user: User) -> None:
        self._user = user
        self._uploads: dict[int, tuple[int, str]] = {}  # upload: descriptor, temporary path
        self.operations: dict[str, Callable[[dict[str, Any], bytes], Reply]] = {
            "read": self._read,
            "write": self._write,
            "abandon": self._abandon,
            "make_folder": self._make_folder,
            "list": self._list,
        }

    def answer(self, op: str, args: dict[str, Any], body: bytes) -> Reply:
        """Carry out a request as the sandbox's user. Raises RequestRefused."""
        with self._user.acting():
            try:
                return self.operations[op](args, body)
            except OSError as error:
                raise refusal(error, _path(args) if "path" in args else "/", writing=op in WRITING) from error

    def _read(self, args: dict[str, Any], _body: bytes) -> Reply:
        path, offset, limit = _path(args), int(args["offset"]), max(0, min(int(args["limit"]), MAX_BODY))
        if not 0 <= offset < END_OF_FILES:
            raise RequestRefused("bad_request", f"offset {str(offset)[:40]}: no file is as long")
        fd = _open_regular(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            parts: list[bytes] = []
            left = limit
            while left and (part := os.pread(fd, left, offset)):
                parts.append(part)
                offset += len(part)
                left -= len(part)
            eof = left > 0 or (0 < size <= offset)
        finally:
            os.close(fd)
        return {"size": size, "eof": eof}, b"".join(parts)

    def _write(self, args: dict[str, Any], body: bytes) -> Reply:
        path, upload = os.path.realpath(_path(args)), int(args["upload"])
        try:
            if upload not in self._uploads:
                self._uploads[upload] = _create_temporary(path)
                while len(self._uploads) > MAX_UPLOADS:
                    self._discard(next(iter(self._uploads)))
            fd, temporary = self._uploads[upload]
            part = memoryview(body)
            while part:
                part = part[os.write(fd, part) :]
            if not args["last"]:
                return {}, b""
            if args.get("append") and os.path.exists(path):
                _append(fd, path)
                os.unlink(temporary)
            else:
                os.rename(temporary, path)
            os.close(self._uploads.pop(upload)[0])
        except BaseException:
            self._discard(upload)
            raise
        return {"file": _info(path, os.lstat(path))}, b""

    def _abandon(self, args: dict[str, Any], _body: bytes) -> Reply:
        self._discard(int(args["upload"]))
        return {}, b""

    def _make_folder(self, args: dict[str, Any], _body: bytes) -> Reply:
        path = _path(args)
        make_folders(path)
        if not os.path.isdir(path):
            raise RequestRefused("not_a_directory", path)
        return {}, b""

    def _discard(self, upload: int) -> None:
        """Remove what was received of an upload."""
        if upload in self._uploads:
            fd, temporary = self._uploads.pop(upload)
            os.close(fd)
            with suppress(OSError):
                os.unlink(temporary)

    def _list(self, args: dict[str, Any], _body: bytes) -> Reply:
        wanted, skip = (max(0, int(args.get(name, 0))) for name in ("max_entries", "skip"))
        recursive = args["recursive"]
        folders, used, looked_at, truncated = [_path(args)], 2, 0, False
        entries: list[bytes] = []
        while folders and not truncated:
            folder = folders.pop()
            try:
                with os.scandir(folder) as found:  # memory for as many as are wanted, however many there are
                    names = nsmallest(skip + wanted - len(entries) + 1, (entry.name for entry in found))
            except OSError:
                if not looked_at:
                    raise
                continue  # a directory that the user may not read, or that is gone
            if not recursive:  # then what is skipped need not be looked at
                names, skip = names[skip:], 0
            for name in names:
                path = os.path.join(folder, name)
                try:
                    facts = os.lstat(path)
                except OSError:
                    continue  # it is gone
                looked_at += 1
                if recursive and stat.S_ISDIR(facts.st_mode):
                    folders.append(path)
                raw = b"" if looked_at <= skip else encode_json(_info(path, facts))
                used += len(raw) + 1 if raw else 0
                if len(entries) >= wanted or used > MAX_LISTING or looked_at > MAX_ENTRIES:
                    truncated = True
                    break
                if raw:
                    entries.append(raw)
        return {"truncated": truncated}, b"[" + b",".join(entries) + b"]"


def _path(args: dict[str, Any]) -> str:
    """Return the absolute path of a request; relative ones start in the workspace."""
    return os.path.normpath(os.path.join(WORKSPACE, args["path"]))


def _create_temporary(path: str) -> tuple[int, str]:
    """Create a file beside `path` that is to replace it; returns its descriptor and its path."""
    make_folders(os.path.dirname(path))
    mode = 0o644
    with suppress(FileNotFoundError):
        facts = os.stat(path)
        _require_regular(facts, path)
        mode = stat.S_IMODE(facts.st_mode)
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name[:200]}.{os.urandom(6).hex()}.part")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    os.fchmod(fd, mode)
    return fd, temporary


def _append(part: int, path: str) -> None:
    """Append what is in the file `part` to the file at `path`: all of it, or nothing if it does not fit."""
    fd = _open_regular(path, os.O_WRONLY | os.O_APPEND)
    try:
        size, copied = os.fstat(fd).st_size, 0
        try:
            while data := os.pread(part, COPY_BYTES, copied):
                copied += os.write(fd, data)
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def _require_regular(facts: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(facts.st_mode):
        raise RequestRefused("is_directory", f"{path}: is a directory")
    if not stat.S_ISREG(facts.st_mode):
        raise RequestRefused("not_a_file", f"{path}: is not a regular file")


def _open_regular(path: str, flags: int) -> int:
    """Open a file that cannot block the agent. It is checked before, too: opening a device can have effects."""
    _require_regular(os.stat(path), path)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _info(path: str, facts: os.stat_result) -> dict[str, Any]:
    mode = facts.st_mode
    kind = "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "other"
    if stat.S_ISLNK(mode):
        kind = "link"
    return {"path": path, "kind": kind, "size": facts.st_size, "mtime": min(max(facts.st_mtime, 0.0), LATEST)}
