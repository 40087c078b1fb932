"""Copies of files between sandboxes and directories of the host. A directory travels as one tar archive.

A copy is there as a whole or not at all, however it ends.
"""

import logging
import os
import posixpath
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager

from anyio import CancelScope
from anyio.to_thread import run_sync

from guest.client.messages import FileChunk
from guest.client.wire import one_line
from mcp_sandbox.config import HostDir
from mcp_sandbox.errors import FileTooLarge, HostFileFailed, WrongFileKind
from mcp_sandbox.sandboxes import tar_stream
from mcp_sandbox.sandboxes.file_access import CHUNK_BYTES, DIRECTORY, resolve
from mcp_sandbox.sandboxes.host_dirs import NewFile, Place, find_place, list_folder, look_up, open_file
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import CopiedFile

REPORT_BYTES = 16 << 20  # between two reports of progress
MAX_LOGGED_CHARS = 300
ARCHIVE = ".tar"

Report = Callable[[int], Awaitable[None]]  # how many bytes have been copied

logger = logging.getLogger(__name__)


class HostCopies:
    """What one owner copies between a sandbox and the directories that the operator opened."""

    def __init__(
        self, service: SandboxService, dirs: Sequence[HostDir], owner: str, sandbox_id: str, report: Report
    ) -> None:
        self._service, self._dirs = service, dirs
        self._owner, self._sandbox_id = owner, sandbox_id
        self._report = report
        self._max_bytes = service.settings.files.max_copy_bytes

    async def upload(self, source: str, path: str | None) -> CopiedFile:
        """Copy a file or directory of the host into the sandbox; without `path` into the workspace.

        Raises:
            BadRequest, HostDirNotFound, HostFileFailed, FileError, SandboxError: nothing was copied.
        """
        place = find_place(self._dirs, source)
        with self._logged("upload", str(place), path or ""):
            found = await run_sync(look_up, place)
            where = _named(path or "", place.name + ARCHIVE * found.is_folder)
            skipped: list[Place] = []
            parts = _packed(place, skipped) if found.is_folder else _content(place)
            async with aclosing(parts), aclosing(self._bounded(parts, str(place))) as bounded:
                written = await self._service.write_parts(self._owner, self._sandbox_id, where, bounded)
        return CopiedFile(
            source=str(place),
            target=written.path,
            size=written.size,
            archive=found.is_folder,
            skipped=len(skipped),
            unpack=f"tar -xf {shlex.quote(written.path)}" if found.is_folder else None,
        )

    async def download(self, path: str, target: str, *, overwrite: bool) -> CopiedFile:
        """Copy a file or directory of the sandbox to the host. A file that exists is kept unless `overwrite`.

        Raises:
            BadRequest, HostDirNotFound, HostDirReadOnly, HostFileFailed, FileError, SandboxError: nothing was copied.
        """
        where = resolve(path)
        place = find_place(self._dirs, target, writing=True)
        with self._logged("download", where, str(place)):
            parts, is_folder = await self._of_sandbox(where)
            if not place.parts or target.endswith("/"):
                place = place.below((posixpath.basename(where) or "root") + ARCHIVE * is_folder)
            size = 0
            async with (
                aclosing(parts),
                aclosing(self._bounded(parts, where)) as bounded,
                _new_file(place, overwrite=overwrite) as file,
            ):
                async for part in bounded:
                    await run_sync(file.write, part)
                    size += len(part)
        return CopiedFile(source=where, target=str(place), size=size, archive=is_folder)

    async def _of_sandbox(self, where: str) -> tuple[AsyncGenerator[bytes], bool]:
        """Return the content at a path in the sandbox, and whether it is an archive of a directory."""
        try:
            return self._read_on(where, await self._read(where, 0)), False
        except WrongFileKind as error:
            if error.kind != DIRECTORY:
                raise
        return self._service.pack(self._owner, self._sandbox_id, where), True

    async def _read(self, where: str, offset: int) -> FileChunk:
        return await self._service.read(self._owner, self._sandbox_id, where, offset=offset, limit=CHUNK_BYTES)

    async def _read_on(self, where: str, chunk: FileChunk) -> AsyncGenerator[bytes]:
        offset = 0
        while chunk.data:
            yield chunk.data
            offset += len(chunk.data)
            if chunk.eof:
                return
            chunk = await self._read(where, offset)

    async def _bounded(self, parts: AsyncIterator[bytes], path: str) -> AsyncGenerator[bytes]:
        """Yield the parts, up to the limit of the settings, and report progress."""
        copied = reported = 0
        async for part in parts:
            copied += len(part)
            if copied > self._max_bytes:
                raise FileTooLarge(path, copied, self._max_bytes)
            yield part
            if copied - reported >= REPORT_BYTES:
                reported = copied
                await self._report(copied)

    @contextmanager
    def _logged(self, action: str, source: str, target: str) -> Iterator[None]:
        """Log a copy and how it ended: the host's files are touched at a model's word."""
        line = one_line(f"{action} of {source!r} to {target!r}", MAX_LOGGED_CHARS)
        try:
            yield
        except BaseException as error:
            logger.warning("%s by %s, sandbox %s: %s", line, self._owner, self._sandbox_id, type(error).__name__)
            raise
        logger.warning("%s by %s, sandbox %s: done", line, self._owner, self._sandbox_id)


def _named(path: str, name: str) -> str:
    """Return the path of a copy: a path that names no file gets the name of the source."""
    return path + name if not path or path.endswith("/") else path


async def _content(place: Place) -> AsyncGenerator[bytes]:
    """Yield a file of the host, as long as it is at first."""
    fd = await run_sync(open_file, place)
    try:
        size, sent = os.fstat(fd).st_size, 0
        while sent < size:
            try:
                part = await run_sync(os.pread, fd, min(CHUNK_BYTES, size - sent), sent)
            except OSError as error:
                raise place.failed(error) from error
            if not part:
                raise HostFileFailed(str(place), "it became shorter while it was read")
            sent += len(part)
            yield part
    finally:
        os.close(fd)


async def _packed(top: Place, skipped: list[Place]) -> AsyncGenerator[bytes]:
    """Yield a directory of the host as an archive, and collect what is neither a file nor a directory."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        for name in await run_sync(list_folder, folder):
            place = folder.below(name)
            member = "/".join(place.parts[len(top.parts) :])
            try:
                found = await run_sync(look_up, place)
            except HostFileFailed:  # a link, a device, or gone
                skipped.append(place)
                continue
            if found.is_folder:
                waiting.append(place)
                yield tar_stream.header(f"{member}/", None, found.mtime)
                continue
            async with aclosing(_content_of_size(place, found.size)) as parts:
                yield tar_stream.header(member, found.size, found.mtime)
                async for part in parts:
                    yield part
            yield tar_stream.padding(found.size)
    yield tar_stream.END


async def _content_of_size(place: Place, size: int) -> AsyncGenerator[bytes]:
    """Yield exactly `size` bytes of a file: its header is out already."""
    left = size
    async with aclosing(_content(place)) as parts:
        async for part in parts:
            yield part[:left]
            left -= min(left, len(part))
    if left:
        raise HostFileFailed(str(place), "it became shorter while it was read")


@asynccontextmanager
async def _new_file(place: Place, *, overwrite: bool) -> AsyncIterator[NewFile]:
    """Yield a file that gets its name at the end of the block, or is removed if the block fails."""
    file = await run_sync(lambda: NewFile(place, overwrite=overwrite))
    try:
        yield file
        await run_sync(file.put)
    finally:
        with CancelScope(shield=True):
            await run_sync(file.discard)
