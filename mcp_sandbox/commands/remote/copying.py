"""`mcp-sandbox cp`: files and directories into a sandbox and out of it, streamed."""

import os
import posixpath
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from guest.places import WORKSPACE
from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.remote.client import CHUNK_BYTES, Server
from mcp_sandbox.commands.remote.errors import CannotCopy, RequestRefused
from mcp_sandbox.commands.remote.packing import Packing
from mcp_sandbox.commands.remote.sandboxes import path_of, server_for
from mcp_sandbox.config import Settings
from mcp_sandbox.private import users_umask

MAX_FILES = 100_000  # of one directory; a hostile machine could list files forever

NOT_LISTED = ("file_not_found", "wrong_file_kind", "file_refused")  # the answers for what is no directory


@dataclass(frozen=True, slots=True)
class Place:
    """A path in a sandbox."""

    sandbox_id: str
    path: str


def copy(settings: Settings, url: str | None, source: str, target: str) -> int:
    """Copy a file or a directory between this host and a sandbox."""

    def work() -> int:
        begin, end = parse_place(source), parse_place(target)
        if (begin is None) == (end is None):
            raise CannotCopy("One of the two paths must be in a sandbox, as ID:PATH, and the other one on this host.")
        server = server_for(settings, url)
        with _progress() as bars:
            if end is not None:
                _upload(server, Path(source), end, bars)
            elif begin is not None:
                with users_umask():
                    _download(server, begin, Path(target), bars)
        return 0

    return report_errors(work)


def parse_place(text: str) -> Place | None:
    """Return the place in a sandbox that `ID:PATH` names; None: a path of this host, such as ./a:b or /a:b."""
    sandbox_id, separator, path = text.partition(":")
    if not separator or "/" in sandbox_id or not sandbox_id:
        return None
    return Place(sandbox_id, path or ".")


def _progress() -> Progress:
    """Return progress bars, which are shown on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


# -- to a sandbox ------------------------------------------------------------------------------------------


def _upload(server: Server, source: Path, place: Place, bars: Progress) -> None:
    into = place.path.endswith("/") or place.path in (".", "..") or _is_directory(server, place)
    root = PurePosixPath(place.path) / source.resolve().name if into else PurePosixPath(place.path)
    if not source.is_dir():
        _send(server, source, place.sandbox_id, str(root), bars)
        return
    packing = Packing(source)
    bar = bars.add_task(_shown(source), total=packing.size())
    parts = packing.parts(lambda size: bars.advance(bar, size))
    unpacked = server.put(f"{path_of(place.sandbox_id)}/files/archive", parts, None, path=str(root))
    if unpacked["files"] != packing.files:
        raise CannotCopy(f"The server unpacked {unpacked['files']} of {packing.files} files.")


def _shown(file: Path) -> str:
    return file.name if file.name.isprintable() else ascii(file.name)


def _send(server: Server, file: Path, sandbox_id: str, path: str, bars: Progress) -> None:
    with file.open("rb") as content:
        size = os.fstat(content.fileno()).st_size
        bar = bars.add_task(_shown(file), total=size)

        def parts() -> Iterator[bytes]:
            left = size  # the request has announced as many bytes
            while left and (part := content.read(min(CHUNK_BYTES, left))):
                left -= len(part)
                yield part
                bars.advance(bar, len(part))
            if left:
                raise CannotCopy(f"{file} became shorter while it was copied.")

        server.put(f"{path_of(sandbox_id)}/files/content", parts(), size, path=path)
        bars.remove_task(bar)


# -- from a sandbox ----------------------------------------------------------------------------------------


def _download(server: Server, place: Place, target: Path, bars: Progress) -> None:
    name = PurePosixPath(place.path).name
    if not _is_directory(server, place):
        _receive(server, place, target / name if target.is_dir() else target, bars)
        return
    root = target / name if target.is_dir() and name not in ("", "..") else target
    root.mkdir(exist_ok=True)
    for path, below in _files(server, place):
        file = root / below
        if any((root / folder).is_symlink() for folder in below.parents[:-1]):  # the last one is the root itself
            raise CannotCopy(f"{file.parent} has a link where the sandbox has a directory: nothing more is copied.")
        file.parent.mkdir(parents=True, exist_ok=True)
        _receive(server, Place(place.sandbox_id, path), file, bars)


def _receive(server: Server, place: Place, target: Path, bars: Progress) -> None:
    """Download a file. It appears at its path when it is complete."""
    part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    try:
        with server.download(f"{path_of(place.sandbox_id)}/files/content", path=place.path) as (size, parts):
            bar = bars.add_task(target.name, total=size)
            with part.open("xb") as file:
                for data in parts:
                    file.write(data)
                    bars.advance(bar, len(data))
            part.replace(target)
            bars.remove_task(bar)
    finally:
        part.unlink(missing_ok=True)


def _is_directory(server: Server, place: Place) -> bool:
    """Return whether a path in a sandbox is a directory: then it can be listed."""
    try:
        server.get(f"{path_of(place.sandbox_id)}/files", path=place.path)
    except RequestRefused as error:
        if error.problem in NOT_LISTED:
            return False
        raise
    return True


def _files(server: Server, place: Place) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield the files below a directory: their paths, and where they are below it. A machine may list anything."""
    root = PurePosixPath(posixpath.normpath(posixpath.join(WORKSPACE, place.path)))
    folders, seen = [root], 0
    while folders:
        folder = folders.pop()
        for entry in _entries(server, place.sandbox_id, str(folder)):
            path = PurePosixPath(entry["path"])
            if path.parent != folder or path.name == ".." or not path.name.isprintable():
                raise CannotCopy(f"The sandbox has a file with an unusual name, {str(path)!r}: nothing more is copied.")
            seen += 1
            if seen > MAX_FILES:
                raise CannotCopy(f"{place.path} has more than {MAX_FILES:,} files.")
            if entry["kind"] == "dir":
                folders.append(path)
            elif entry["kind"] == "file":
                yield entry["path"], path.relative_to(root)


def _entries(server: Server, sandbox_id: str, path: str) -> Iterator[dict[str, str]]:
    """Yield the entries of one directory. A recursive listing would end after some thousands."""
    offset: int | None = 0
    while offset is not None:
        page = server.get(f"{path_of(sandbox_id)}/files", path=path, offset=offset)
        yield from page["entries"]
        offset = page["next_offset"]
