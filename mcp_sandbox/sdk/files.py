"""Files of a sandbox. They are streamed from and to local paths, whatever their size."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path, PurePosixPath
from uuid import uuid4

import anyio

from guest.places import WORKSPACE
from mcp_sandbox.errors import BadRequest, FileTooLarge, WrongFileKind
from mcp_sandbox.sdk.errors import hinted
from mcp_sandbox.sdk.link import Ask, Link, repeated
from mcp_sandbox.views import FileList, FileView, WrittenFile

PART_BYTES = 1 << 20
MAX_READ_BYTES = 64 << 20  # of a file that is read into memory
MAX_ENTRIES = 100_000  # of one listing; a hostile machine could list files forever

Where = Callable[[], tuple[Link, str]]  # the link, and the path of the sandbox; raises if it is not open


class AsyncFiles:
    """The files of one sandbox. Relative paths begin in /workspace."""

    def __init__(self, where: Where) -> None:
        self._where = where

    async def read(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return a file's content.

        Raises:
            FileTooLarge: it has more than `max_bytes`; `download` takes files of any size.
            FileError, SandboxError: as their names say.
        """
        link, box = self._where()
        ask = Ask("GET", f"{box}/files/content", {"path": path})

        async def attempt() -> bytes:
            data = bytearray()
            async with link.attempt(ask) as answer:
                size = int(answer.headers.get("content-length", 0))
                async for part in answer.aiter_bytes():
                    data += part
                    if max(size, len(data)) > max_bytes:
                        raise hinted(FileTooLarge(path, max(size, len(data)), max_bytes), "Use files.download.")
            return bytes(data)

        return await repeated(ask, attempt)

    async def read_text(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> str:
        """Return a file's content as text; raises WrongFileKind if it is not UTF-8, and what `read` raises."""
        data = await self.read(path, max_bytes=max_bytes)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise hinted(WrongFileKind(path, "not UTF-8 text"), "Use files.read, which returns bytes.") from None

    async def write(self, path: str, content: bytes | str) -> WrittenFile:
        """Create or replace a file, and its directories."""
        data = content.encode() if isinstance(content, str) else content

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(data), PART_BYTES):
                yield data[start : start + PART_BYTES]

        return await self._put(path, parts)

    async def upload(self, local: str | os.PathLike[str], path: str | None = None) -> WrittenFile:
        """Copy a local file into the sandbox; without a path, under its name into /workspace."""
        source = Path(local)

        async def parts() -> AsyncIterator[bytes]:
            async with await anyio.open_file(source, "rb") as file:
                while part := await file.read(PART_BYTES):
                    yield part

        return await self._put(path or source.name, parts)

    async def download(self, path: str, local: str | os.PathLike[str] | None = None) -> Path:
        """Copy a file of the sandbox to a local path or into a local directory; default: the working directory.

        The local file appears once all of it has arrived.
        """
        link, box = self._where()
        target = Path(local) if local is not None else Path.cwd()
        if target.is_dir():
            target /= PurePosixPath(path).name
        partial = target.with_name(f".{target.name}.{uuid4().hex[:8]}.part")
        ask = Ask("GET", f"{box}/files/content", {"path": path})

        async def attempt() -> None:
            async with link.attempt(ask) as answer, await anyio.open_file(partial, "wb") as file:
                async for part in answer.aiter_bytes(PART_BYTES):
                    await file.write(part)

        try:
            await repeated(ask, attempt)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    async def list(self, path: str = WORKSPACE, *, recursive: bool = False) -> list[FileView]:
        """Return the entries of a directory."""
        link, box = self._where()
        found: list[FileView] = []
        offset: int | None = 0
        while offset is not None and offset < MAX_ENTRIES:
            query = {"path": path, "recursive": str(recursive).lower(), "offset": offset}
            page = await link.ask(Ask("GET", f"{box}/files", query), FileList)
            found += page.entries
            offset = page.next_offset
        if page.truncated:
            raise BadRequest(f"{path} has more entries than a listing shows; list its directories.")
        return found

    async def _put(self, path: str, parts: Callable[[], AsyncIterator[bytes]]) -> WrittenFile:
        link, box = self._where()
        return await link.ask(Ask("PUT", f"{box}/files/content", {"path": path}, content=parts), WrittenFile)
