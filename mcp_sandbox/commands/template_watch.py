"""Notices that people have changed templates: the files are looked at every second."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import anyio
import anyio.to_thread

from templates.catalogue import Catalogue

LOOK_EVERY_S = 1.0  # editors write a file in several steps: a template counts as changed when it was left alone so long

Making = frozenset[tuple[str, int, int, int]]  # of a directory: every file's path, number, date and size


class Watch:
    """Templates as they were when they were last looked at."""

    def __init__(self, catalogue: Catalogue, names: Collection[str] | None) -> None:
        """Watch some templates, or all there are and will be."""
        self._catalogue = catalogue
        self._names = names
        self._seen = self._look()

    async def next(self) -> list[str]:
        """Wait for changes; returns the templates that are not as they were, or are new."""
        before = self._seen
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            now = await anyio.to_thread.run_sync(self._look)
            if now == before and now != self._seen:
                changed = [name for name, making in now.items() if making != self._seen.get(name)]
                self._seen = now
                if changed:  # and not only removed
                    return changed
            before = now

    def _look(self) -> Mapping[str, Making]:
        return {
            entry.name: _making(entry.folder)
            for entry in self._catalogue.entries()
            if self._names is None or entry.name in self._names
        }


def _making(folder: Path) -> Making:
    found = []
    for directory, _, files in os.walk(folder):
        for file in (Path(directory, name) for name in files):
            try:
                status = file.lstat()
            except FileNotFoundError:  # removed just now
                continue
            found.append((str(file), status.st_ino, status.st_mtime_ns, status.st_size))
    return frozenset(found)
