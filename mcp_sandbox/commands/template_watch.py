"""Detect changed templates by checking their files every second."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import anyio
import anyio.to_thread

from templates.catalogue import Catalogue

POLL_S = 1.0  # editors write a file in several steps: a template has changed when it then stays the same this long

Stamp = frozenset[tuple[str, int, int, int]]  # of a directory: each file's path, inode, modification time and size


class Watch:
    """The state of templates at the last check."""

    def __init__(self, catalogue: Catalogue, names: Collection[str] | None) -> None:
        """Watch the named templates; None watches all, new ones too."""
        self._catalogue = catalogue
        self._names = names
        self._seen = self._stamps()

    async def next(self) -> list[str]:
        """Wait for changes; return the names of changed and new templates."""
        before = self._seen
        while True:
            await anyio.sleep(POLL_S)
            now = await anyio.to_thread.run_sync(self._stamps)
            if now == before and now != self._seen:
                changed = [name for name, stamp in now.items() if stamp != self._seen.get(name)]
                self._seen = now
                if changed:  # empty if templates were only removed
                    return changed
            before = now

    def _stamps(self) -> Mapping[str, Stamp]:
        return {
            entry.name: _stamp(entry.folder)
            for entry in self._catalogue.entries()
            if self._names is None or entry.name in self._names
        }


def _stamp(folder: Path) -> Stamp:
    found = []
    for directory, _, files in os.walk(folder):
        for file in (Path(directory, name) for name in files):
            try:
                status = file.lstat()
            except FileNotFoundError:  # removed just now
                continue
            found.append((str(file), status.st_ino, status.st_mtime_ns, status.st_size))
    return frozenset(found)
