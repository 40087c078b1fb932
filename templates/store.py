"""Build results, stored under a hash of their inputs.

    <home>/<kind>/<key>/            an entry: its files, and meta.json with its inputs
    <home>/staging/<kind>-<key>.*   an entry that is being made; readers never look here
    <home>/locks/<kind>-<key>       locked while an entry is made or removed; removed with the lock
    <home>/logs/<step>-<key>.log    the output of making an entry; removed with the entry

An entry appears by one rename, complete or not at all. If its maker dies, the staging directory remains and the lock is
free: the next process that takes the lock knows that the maker is dead and cleans up. An entry that machines were
started from is held (see `templates.locks`) and cannot be removed.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.from_thread
import anyio.to_thread

from templates.disk import disk_usage
from templates.locks import exclusive, same_file
from templates.removal import remove_tree
from templates.together import both

MAX_CHECKSUMS = 64  # files; images and snapshots have a handful, trees ten thousand
KEY_CHARS = 20  # 80 bits of SHA-256: no accidental collisions, and short enough to read
LOCK_POLL_S = 0.2  # flock cannot be awaited; builds take seconds, so this delay does not matter
META = "meta.json"
CHUNK = 1024 * 1024
_LIBC = ctypes.CDLL(None, use_errno=True)
_NAME = re.compile(r"[a-z0-9]+")  # kinds and keys become parts of paths
_KEYED_LOG = re.compile(rf".+-([0-9a-f]{{{KEY_CHARS}}})\.log")

Inputs = Mapping[str, Any]
Make = Callable[[Path], Awaitable[Mapping[str, Any]]]
Removal = Literal["removed", "in use", "gone"]
Checksum = tuple[int, int]  # size and CRC-32: enough against accidental damage, and three times as fast as SHA-256


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished build result."""

    kind: str
    key: str
    path: Path
    id: str  # new each time the entry is made: the same inputs can give different files
    inputs: Inputs  # everything it was made from; the key is their hash
    details: Mapping[str, Any]  # facts learned while making it, such as exact versions
    made: datetime
    size_bytes: int  # on disk
    files: Mapping[str, Checksum]  # of every file; empty if there are too many


def key_of(inputs: Inputs) -> str:
    """Return the key of the entry made from `inputs`."""
    canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_CHARS]


class Store:
    """A directory of entries that any number of processes can share."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.logs = home / "logs"

    def find(self, kind: str, inputs: Inputs) -> Entry | None:
        """Return the entry made from `inputs`, if there is one."""
        try:
            return _read_entry(self._path(kind, key_of(inputs)) / META)
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def obtain(self, kind: str, inputs: Inputs, make: Make) -> Entry:
        """Return the entry made from `inputs`. If there is none, `make` fills an empty directory.

        If another process is making it, wait for that one. If `make` fails or is cancelled, nothing is left.
        """
        if found := self.find(kind, inputs):
            return found
        key = key_of(inputs)
        async with self._locked(kind, key):
            if found := self.find(kind, inputs):
                return found
            with self._staging(kind, key) as staging:
                details = await make(staging)
                _, files = await both(
                    partial(anyio.to_thread.run_sync, _sync_tree, staging),
                    partial(anyio.to_thread.run_sync, _checksums, staging),
                )
                meta = {
                    "id": secrets.token_hex(8),
                    "inputs": inputs,
                    "details": details,
                    "made": datetime.now(UTC).isoformat(timespec="seconds"),
                    "size_bytes": await anyio.to_thread.run_sync(disk_usage, staging),
                    "files": files,
                }
                (staging / META).write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
                _sync(staging / META)
                _sync(staging)
                return _read_entry(self._publish(staging, self._path(kind, key)) / META)

    def entries(self) -> list[Entry]:
        """Return all entries, sorted by kind and key."""
        found = []
        for meta in sorted(self.home.glob(f"*/*/{META}")):
            if meta.parent.parent.name not in ("staging", "locks", "logs"):
                with suppress(FileNotFoundError):  # removed just now
                    found.append(_read_entry(meta))
        return found

    def entry(self, path: Path) -> Entry:
        """Return the entry at `path`; raises FileNotFoundError."""
        return _read_entry(path / META)

    async def damaged_files(self, entry: Entry) -> list[str]:
        """Return the files of an entry that have changed since it was made."""
        found = await anyio.to_thread.run_sync(_checksums, entry.path) if entry.files else {}
        return [name for name, checksum in entry.files.items() if found.get(name) != checksum]

    async def remove(self, kind: str, key: str) -> Removal:
        """Remove an entry and its logs, unless it is held or gone."""
        path = self._path(kind, key)
        if not path.exists():
            return "gone"
        async with self._locked(kind, key):
            try:
                with exclusive(path), self._staging(kind, key) as staging:
                    path.rename(staging / "removed")  # from here on readers cannot see it
            except FileNotFoundError:
                return "gone"
            except BlockingIOError:
                return "in use"
            self._remove_logs(key)
        return "removed"

    @asynccontextmanager
    async def scratch(self, name: str) -> AsyncIterator[Path]:
        """Create an empty directory for one process at a time. If the process is killed, `sweep` removes it."""
        async with self._locked("scratch", name):
            with self._staging("scratch", name) as path:
                yield path

    def stamp(self, kinds: Iterable[str]) -> tuple[int, ...]:
        """Return a value that changes whenever any process adds or removes an entry of these kinds."""
        return tuple(_changed_ns(self.home / kind) for kind in kinds)

    def sweep(self) -> None:
        """Remove staging directories and lock files of processes that died."""
        for folder in ("staging", "locks"):
            for path in self.home.glob(f"{folder}/*"):
                # A read-only home has nothing to sweep.
                with suppress(PermissionError), self._try_lock(path.name.partition(".")[0]) as locked:
                    if locked and folder == "staging":
                        _remove_if_possible(path)

    def tidy(self) -> None:
        """Sweep, and remove logs whose entry neither exists nor is being made: those of failed builds."""
        self.sweep()
        existing = {entry.key for entry in self.entries()}
        for log in self.logs.glob("*.log"):
            named = _KEYED_LOG.fullmatch(log.name)
            if named and named[1] not in existing and not any(self.home.glob(f"locks/*-{named[1]}")):
                log.unlink(missing_ok=True)

    def _path(self, kind: str, key: str) -> Path:
        if not _NAME.fullmatch(kind) or not _NAME.fullmatch(key):
            raise ValueError(f"not a name in the store: {kind!r}, {key!r}")
        return self.home / kind / key

    def _remove_logs(self, key: str) -> None:
        for log in self.logs.glob(f"*-{key}.log"):
            log.unlink(missing_ok=True)

    @asynccontextmanager
    async def _locked(self, kind: str, key: str) -> AsyncIterator[None]:
        while True:
            with self._try_lock(f"{kind}-{key}") as locked:
                if locked:
                    yield
                    return
            await anyio.sleep(LOCK_POLL_S)

    @contextmanager
    def _try_lock(self, name: str) -> Iterator[bool]:
        path = self.home / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            # A holder removes the file before it unlocks it. A lock on a removed file has no effect: the next
            # process would create and lock a new file.
            if not same_file(file.fileno(), path):
                yield False
                return
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _staging(self, kind: str, key: str) -> Iterator[Path]:
        """Create an empty directory and remove it afterwards unless it was renamed. Requires the entry's lock."""
        parent = self.home / "staging"
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{kind}-{key}.*"):
            _remove_if_possible(stale)
        # A new name each time: a tool that outlived its maker must not write into the next attempt.
        path = Path(tempfile.mkdtemp(prefix=f"{kind}-{key}.", dir=parent))
        try:
            yield path
        finally:
            _remove_if_possible(path)

    def _publish(self, staging: Path, final: Path) -> Path:
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():  # not an entry without its meta.json: it was partly removed by hand
            remove_tree(final)
        staging.rename(final)
        _sync(final.parent)
        return final


def _remove_if_possible(path: Path) -> None:
    with suppress(OSError):  # a later sweep tries again
        remove_tree(path)


def _changed_ns(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _read_entry(meta: Path) -> Entry:
    data = json.loads(meta.read_text())
    return Entry(
        kind=meta.parent.parent.name,
        key=meta.parent.name,
        path=meta.parent,
        id=data["id"],
        inputs=data["inputs"],
        details=data["details"],
        made=datetime.fromisoformat(data["made"]),
        size_bytes=data["size_bytes"],
        files={name: (size, crc) for name, (size, crc) in data.get("files", {}).items()},
    )


def _checksums(tree: Path) -> dict[str, Checksum]:
    """Return the checksum of every file in a tree, except its meta.json; nothing if there are too many."""
    files = [path for path in tree.rglob("*") if path.is_file() and path != tree / META]
    return {str(path.relative_to(tree)): _checksum(path) for path in files} if len(files) <= MAX_CHECKSUMS else {}


def _checksum(path: Path) -> Checksum:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            anyio.from_thread.check_cancelled()  # an image takes seconds: a server that stops must not wait for it
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _sync_tree(tree: Path) -> None:
    """Write everything to disk before the rename publishes it.

    It syncs the whole file system: syncing thousands of files one by one takes ten times as long.
    """
    fd = os.open(tree, os.O_RDONLY)
    try:
        if _LIBC.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(tree))
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
