"""Tar archives as streams: members are read and written one after the other, and no archive is in memory.

`tarfile` would read a header of any length into memory, and blocks while it waits for more.
"""

import tarfile
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Literal

from mcp_sandbox.errors import BadRequest

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
MAX_HEADER_BYTES = 64 * 1024  # of what precedes a member: long names, and attributes that we ignore
MAX_SIZE = 2**60  # of a member; headers can claim negative sizes, too
SPARSE = b"GNU.sparse"
GZIP = b"\x1f\x8b"
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)

Kind = Literal["file", "dir", "other"]


def header(name: str, size: int | None, mtime: float) -> bytes:
    """Return the header of a file, or without a size that of a directory."""
    member = tarfile.TarInfo(name)
    member.type, member.mode = (tarfile.DIRTYPE, 0o755) if size is None else (tarfile.REGTYPE, 0o644)
    member.size, member.mtime = size or 0, int(mtime)
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "replace")


def padding(size: int) -> bytes:
    """Return what follows the content of a member up to the next block."""
    return bytes(-size % BLOCK)


@dataclass(frozen=True, slots=True)
class Member:
    """What an archive says about a member."""

    name: str
    kind: Kind
    size: int


class TarReader:
    """Reads members from parts of an archive. The content of each is read with `content` before the next."""

    def __init__(self, parts: AsyncIterable[bytes]) -> None:
        self._parts = aiter(parts)
        self._data = bytearray()
        self._left = 0  # of the content of the current member
        self._skip = 0  # after it, up to the next block

    async def next(self) -> Member | None:
        """Return the next member, or None at the end of the archive.

        Raises:
            BadRequest: this is no tar archive, or only a part of one.
        """
        async for _ in self.content():
            pass
        given: dict[str, str] = {}  # by the headers before
        while True:
            found = await self._header()
            if found is None:
                return None
            if found.type == tarfile.GNUTYPE_LONGNAME:
                given["path"] = (await self._short(found.size)).rstrip(b"\0").decode("utf-8", "replace")
            elif found.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                given |= pax_fields(await self._short(found.size))
            elif found.type in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
                await self._short(found.size)
            else:
                return self._member(found, given)

    async def content(self) -> AsyncIterator[bytes]:
        """Yield what is left of the current member."""
        while self._left:
            part = await self._some(self._left)
            self._left -= len(part)
            yield part
        await self._exactly(self._skip)
        self._skip = 0

    def _member(self, found: tarfile.TarInfo, given: dict[str, str]) -> Member:
        name, size = given.get("path", found.name), given.get("size", str(found.size))
        if not size.isascii() or not size.isdigit() or len(size) > 20 or int(size) > MAX_SIZE:
            raise BadRequest("The archive is damaged: a member has an impossible size.")
        sparse = SPARSE.decode() in given
        kind: Kind = "file" if found.type in FILES and not sparse else "dir" if found.isdir() else "other"
        if not found.isreg() and found.type in tarfile.SUPPORTED_TYPES:  # such as a link: it has no content
            size = "0"
        self._left, self._skip = int(size), -int(size) % BLOCK
        return Member(name, kind, int(size))

    async def _header(self) -> tarfile.TarInfo | None:
        block = await self._exactly(BLOCK, may_end=True)
        if not block or block.count(0) == BLOCK:
            return None
        if block.startswith(GZIP):
            raise BadRequest("The archive is compressed. Send a plain tar archive.")
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        except tarfile.HeaderError as error:
            raise BadRequest("The content is not a tar archive, or it is damaged.") from error

    async def _short(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise BadRequest(f"A header of the archive has more than {MAX_HEADER_BYTES:,} bytes.")
        data = await self._exactly(size)
        await self._exactly(-size % BLOCK)
        return data

    async def _exactly(self, size: int, *, may_end: bool = False) -> bytes:
        found = bytearray()
        while len(found) < size:
            found += await self._some(size - len(found), may_end=may_end and not found)
            if not found:
                break
        return bytes(found)

    async def _some(self, most: int, *, may_end: bool = False) -> bytes:
        while not self._data:
            part = await anext(self._parts, None)
            if part is None:
                if may_end:
                    return b""
                raise BadRequest("The archive ends in the middle of a member.")
            self._data += part
        part = bytes(self._data[:most])
        del self._data[:most]
        return part


def pax_fields(data: bytes) -> dict[str, str]:
    """Return the attributes of a member that matter here, from records of the form "LENGTH KEY=VALUE\\n"."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(data):
        length, space, _ = data[at : at + 24].partition(b" ")
        if not space or not length.isdigit() or not len(length) + 2 < int(length) <= len(data) - at:
            raise BadRequest("The archive is damaged: attributes of a member cannot be read.")
        key, _, value = data[at + len(length) + 1 : at + int(length) - 1].partition(b"=")
        at += int(length)
        if key.startswith(SPARSE):
            fields[SPARSE.decode()] = ""
        elif key in (b"path", b"size"):
            fields[key.decode()] = value.decode("utf-8", "replace")
    return fields
