"""Finds the files in the outputs directory that a run has created or changed."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH116

import os

from guest.places import OUTPUTS

MAX_FILES = 500  # looked at, in the file system's own order; the rest is missed
Snapshot = dict[str, tuple[int, int]]  # path: size, mtime in ns


class ArtifactWatch:
    """Remembers the outputs directory between runs, so that one look after each run is enough."""

    def __init__(self) -> None:
        self.complete = True  # whether the last look saw everything
        self._known: Snapshot = {}
        self._folders = False  # whether there are folders; a change in one does not change the mtime of OUTPUTS
        self._folder_mtime = -1

    def ignore(self, path: str) -> None:
        """Attribute the current state of a file to no run: the host has written it."""
        if path.startswith(OUTPUTS):
            try:
                facts = os.lstat(path)
            except OSError:
                return
            self._known[path] = (facts.st_size, facts.st_mtime_ns)

    def changes(self) -> list[tuple[str, int]]:
        """Return the files (path, size) that are new or changed since the last look.

        That takes one system call while the directory is empty.
        """
        try:
            mtime = os.stat(OUTPUTS).st_mtime_ns
        except OSError:
            self._known, self.complete = {}, True
            return []
        if mtime == self._folder_mtime and not self._known and not self._folders:
            return []
        self._folder_mtime = mtime
        before = self._known
        self._scan()
        return [(path, facts[0]) for path, facts in self._known.items() if before.get(path) != facts]

    def _scan(self) -> None:
        found: Snapshot = {}
        folders, left, self._folders = [OUTPUTS], MAX_FILES, False
        while folders and left:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        if not left:
                            break
                        left -= 1
                        if entry.is_dir(follow_symlinks=False):
                            self._folders = True
                            folders.append(entry.path)
                        elif entry.is_file(follow_symlinks=False):
                            facts = entry.stat(follow_symlinks=False)
                            found[entry.path] = (facts.st_size, facts.st_mtime_ns)
            except OSError:
                continue
        self.complete = left > 0
        self._known = dict(sorted(found.items()))
