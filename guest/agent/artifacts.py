"""Which files in the outputs directory a run has made or changed."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH116

import os

from guest.places import OUTPUTS

MAX_FILES = 500  # looked at, in the file system's own order; where there are more, the rest is missed
Snapshot = dict[str, tuple[int, int]]  # path: size, mtime in ns


class Watch:
    """Remembers the outputs directory between runs, so that one look after each run is enough."""

    def __init__(self) -> None:
        self.complete = True  # the last look saw everything
        self._known: Snapshot = {}
        self._folders = False  # the last look saw folders; a change in one does not show in the time of the first
        self._folder_mtime = -1

    def know(self, path: str) -> None:
        """What is at `path` now, if it is there, is no run's doing."""
        if path.startswith(OUTPUTS):
            try:
                facts = os.lstat(path)
            except OSError:
                return
            self._known[path] = (facts.st_size, facts.st_mtime_ns)

    def changes(self) -> list[tuple[str, int]]:
        """Files (path, size) that are new or changed since the last look. One system call while it is empty."""
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
