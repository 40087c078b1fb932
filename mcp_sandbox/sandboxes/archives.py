"""Directories of a sandbox as tar archives, in both directions. Only regular files and directories take part.

Listings come from the machine and archives from clients: neither decides where anything is read or written.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

from guest.client.messages import FileChunk, FileInfo
from guest.client.wire import one_line
from guest.errors import ProtocolError
from mcp_sandbox.errors import FileNotFound, FileNotPermitted, FileRefused, WrongFileKind
from mcp_sandbox.sandboxes import tar_stream
from mcp_sandbox.sandboxes.file_access import CHUNK_BYTES, file_operation, resolve, write_parts
from mcp_sandbox.sandboxes.sandbox import Sandbox
from mcp_sandbox.sandboxes.tar_stream import TarReader
from mcp_sandbox.views import SkippedMember, UnpackedArchive

PAGE_ENTRIES = 500  # of one listing
MAX_WAITING = 10_000  # directories that are known but not in the archive yet: each is a path in memory
MAX_SKIPPED = 100  # members whose names are reported
MAX_NAME_CHARS = 200
GONE = (FileNotFound, FileNotPermitted, WrongFileKind)  # since it was listed, or never readable


async def pack(box: Sandbox, where: str) -> AsyncGenerator[bytes]:
    """Yield a directory as an archive. Files that cannot be read are left out.

    Raises:
        FileError, SandboxError: nothing was yielded, or the rest is missing.
    """
    waiting = [where]
    while waiting:
        folder, offset, more = waiting.pop(), 0, True
        while more:
            try:
                entries, more = await _page(box, folder, offset)
            except GONE:
                if folder == where:
                    raise
                break
            offset += len(entries)
            for entry in entries:
                name = entry.path.removeprefix(where.rstrip("/") + "/")
                if entry.kind == "dir":
                    waiting.append(entry.path)
                    yield tar_stream.header(f"{name}/", None, entry.mtime)
                elif entry.kind == "file":
                    async for part in _file(box, entry, name):
                        yield part
            if len(waiting) > MAX_WAITING:
                raise FileRefused(
                    folder, f"an archive of it would need a list of more than {MAX_WAITING:,} directories"
                )
    yield tar_stream.END


async def _page(box: Sandbox, folder: str, offset: int) -> tuple[tuple[FileInfo, ...], bool]:
    """Return some entries of a directory, and whether there are more."""
    prefix = folder.rstrip("/") + "/"
    async with box.use() as lease:
        with file_operation(folder):
            listing = await lease.agent.list(folder, recursive=False, max_entries=PAGE_ENTRIES, skip=offset)
        for entry in listing.entries:
            name = entry.path.removeprefix(prefix)
            if not entry.path.startswith(prefix) or "/" in name or "\0" in name or name in ("", ".", ".."):
                raise ProtocolError("the agent's listing of a directory names something elsewhere")
    return listing.entries, listing.truncated and bool(listing.entries)


async def _file(box: Sandbox, entry: FileInfo, name: str) -> AsyncIterator[bytes]:
    """Yield a member. It has the size that the file has at first, whatever becomes of the file meanwhile."""
    try:
        chunk = await _read(box, entry.path, 0)
    except GONE:
        return
    size, sent = chunk.size, 0
    yield tar_stream.header(name, size, entry.mtime)
    while sent < size:
        part = chunk.data[: size - sent] or bytes(min(CHUNK_BYTES, size - sent))  # zeros if it was cut short
        yield part
        sent += len(part)
        if sent < size:
            chunk = await _read(box, entry.path, sent)
    yield tar_stream.padding(size)


async def _read(box: Sandbox, path: str, offset: int) -> FileChunk:
    async with box.use() as lease:
        with file_operation(path):
            return await lease.agent.read(path, offset=offset, limit=CHUNK_BYTES)


async def unpack(box: Sandbox, where: str, parts: AsyncIterable[bytes]) -> UnpackedArchive:
    """Unpack an archive into a directory, which is created. Other members than files and directories are skipped.

    Raises:
        BadRequest: it is not an archive. What came before is there.
        FileError, SandboxError: a member could not be written. What came before is there.
    """
    reader = TarReader(parts)
    files = folders = size = skipped = 0
    named: list[SkippedMember] = []
    await _make_folder(box, where)
    while (member := await reader.next()) is not None:
        path = _inside(where, member.name)
        if path is not None and member.kind == "file":
            async with box.use() as lease:
                size += (await write_parts(lease.agent, path, reader.content())).size
            files += 1
        elif path is not None and member.kind == "dir":
            await _make_folder(box, path)
            folders += 1
        else:
            skipped += 1
            reason = "outside the directory" if path is None else "neither a file nor a directory"
            if len(named) < MAX_SKIPPED:
                named.append(SkippedMember(name=one_line(member.name, MAX_NAME_CHARS), reason=reason))
    return UnpackedArchive(
        path=where, files=files, directories=folders, size=size, skipped=skipped, skipped_members=named
    )


def _inside(where: str, name: str) -> str | None:
    """Return the path of a member; None if it would not be in the directory."""
    if name.startswith("/") or ".." in name.split("/"):
        return None
    return resolve(name or ".", where)


async def _make_folder(box: Sandbox, path: str) -> None:
    async with box.use() as lease:
        with file_operation(path):
            await lease.agent.make_folder(path)
