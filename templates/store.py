"""Things that took long to make, kept under the hash of what they were made from.

    <home>/<kind>/<key>/            what was made, and meta.json that says from what
    <home>/staging/<kind>-<key>.*   being made; never looked at by readers
    <home>/locks/<kind>-<key>       held while somebody makes or removes it
    <home>/logs/<step>-<key>.log    what was said while it was made

An entry appears by one rename, whole or not at all. A maker that died leaves its staging directory behind and
its lock free: whoever can take the lock knows that the maker is dead, and removes what it left. An entry that machines
stand on is held (see `templates.holding`), and stays until nobody holds it.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread

from templates.holding import alone, is_at
from templates.removal import remove_tree

KEY_CHARS = 20  # 80 bits of SHA-256: no accidental twins, and names short enough to read
LOCK_POLL_S = 0.2  # flock cannot be awaited; builds take seconds, so a fifth of one is not noticed
META = "meta.json"
_LIBC = ctypes.CDLL(None, use_errno=True)
_NAME = re.compile(r"[a-z0-9]+")  # kinds and keys become parts of paths

Inputs = Mapping[str, Any]
Make = Callable[[Path], Awaitable[Mapping[str, Any]]]
Removal = Literal["removed", "in use", "gone"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished thing in the store."""

    kind: str
    key: str
    path: Path
    id: str  # differs between two makings of the same thing: what lies in it may differ too
    inputs: Inputs  # all it was made from; the key is their hash
    details: Mapping[str, Any]  # what was learned while making it, such as exact versions
    made: datetime
    size_bytes: int  # room it takes on disk


def key_of(inputs: Inputs) -> str:
    """The name of whatever is made from `inputs`."""
    canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_CHARS]


class Store:
    """A directory of finished things that any number of processes can share."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.logs = home / "logs"

    def get(self, kind: str, inputs: Inputs) -> Path | None:
        """Where the thing made from `inputs` lies, or None if nobody made it yet."""
        path = self._path(kind, key_of(inputs))
        return path if (path / META).is_file() else None

    async def obtain(self, kind: str, inputs: Inputs, make: Make) -> Path:
        """The thing made from `inputs`: found, or made now by `make` in an empty directory.

        If somebody else is making it already, wait for them. If `make` fails or is cancelled nothing is left.
        """
        if found := self.get(kind, inputs):
            return found
        key = key_of(inputs)
        async with self._locked(kind, key):
            if found := self.get(kind, inputs):
                return found
            with self._staging(kind, key) as staging:
                details = await make(staging)
                meta = {
                    "id": secrets.token_hex(8),
                    "inputs": inputs,
                    "details": details,
                    "made": datetime.now(UTC).isoformat(timespec="seconds"),
                    "size_bytes": await anyio.to_thread.run_sync(_disk_usage, staging),
                }
                (staging / META).write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
                await anyio.to_thread.run_sync(_sync_tree, staging)
                return self._publish(staging, self._path(kind, key))

    def entries(self) -> list[Entry]:
        """All finished things, by kind and key."""
        found = []
        for meta in sorted(self.home.glob(f"*/*/{META}")):
            if meta.parent.parent.name not in ("staging", "locks", "logs"):
                with suppress(FileNotFoundError):  # removed just now
                    found.append(_read_entry(meta))
        return found

    def entry(self, path: Path) -> Entry:
        """What is known about the finished thing at `path`."""
        return _read_entry(path / META)

    async def remove(self, kind: str, key: str) -> Removal:
        """Remove one thing, unless it was not there or somebody holds it."""
        path = self._path(kind, key)
        if not path.exists():
            return "gone"
        async with self._locked(kind, key):
            try:
                with alone(path), self._staging(kind, key) as staging:
                    path.rename(staging / "removed")  # gone for readers at once, whatever happens next
            except FileNotFoundError:
                return "gone"
            except BlockingIOError:
                return "in use"
        return "removed"

    def stamp(self, kinds: Iterable[str]) -> tuple[int, ...]:
        """What changes whenever a thing of one of these kinds is made or removed, by whichever process."""
        return tuple(_changed_ns(self.home / kind) for kind in kinds)

    def sweep(self) -> None:
        """Remove what makers that died have left behind."""
        for path in self.home.glob("staging/*"):
            with self._try_lock(path.name.partition(".")[0]) as held:
                if held:
                    remove_tree(path)

    def tidy(self) -> None:
        """Remove logs and locks of things that are neither there nor being made."""
        self.sweep()
        there = {entry.key for entry in self.entries()}
        for lock in self.home.glob("locks/*"):
            with self._try_lock(lock.name) as held:
                key = lock.name.rpartition("-")[2]
                if held and key not in there:
                    for log in self.logs.glob(f"*-{key}.log"):
                        log.unlink(missing_ok=True)
                    lock.unlink(missing_ok=True)

    def _path(self, kind: str, key: str) -> Path:
        if not _NAME.fullmatch(kind) or not _NAME.fullmatch(key):
            raise ValueError(f"not a name in the store: {kind!r}, {key!r}")
        return self.home / kind / key

    @asynccontextmanager
    async def _locked(self, kind: str, key: str) -> AsyncIterator[None]:
        while True:
            with self._try_lock(f"{kind}-{key}") as held:
                if held:
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
            else:
                # One that was removed after we opened it keeps nobody out: the next one would lock another file.
                yield is_at(file.fileno(), path)

    @contextmanager
    def _staging(self, kind: str, key: str) -> Iterator[Path]:
        """An empty directory, removed afterwards unless it was renamed. Call it with the lock held."""
        parent = self.home / "staging"
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{kind}-{key}.*"):
            remove_tree(stale)
        # A name of its own each time: a tool that outlived its maker must not write into the next attempt.
        path = Path(tempfile.mkdtemp(prefix=f"{kind}-{key}.", dir=parent))
        try:
            yield path
        finally:
            remove_tree(path)

    def _publish(self, staging: Path, final: Path) -> Path:
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():  # without its meta.json it is no entry: somebody removed half of it by hand
            shutil.rmtree(final)
        staging.chmod(0o755)  # mkdtemp made it private
        staging.rename(final)
        _sync(final.parent)
        return final


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
    )


def _disk_usage(tree: Path) -> int:
    """Room a tree takes: holes take none, and a file with two names takes it once."""
    taken: dict[int, int] = {}
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            found = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - ten thousand paths of a template's tree
            taken[found.st_ino] = found.st_blocks * 512  # that is the unit of st_blocks
    return sum(taken.values())


def _sync_tree(tree: Path) -> None:
    """Have the disk take everything before the rename makes it count.

    The whole file system at once: one file after the other takes ten times as long when there are thousands.
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
