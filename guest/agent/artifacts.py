"""Which files in the outputs directory a run has made or changed."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH116

import os

from guest.places import OUTPUTS

MAX_FILES = 500  # looked at; a run that leaves more has its newest ones missed, not the machine slowed
Snapshot = dict[str, tuple[int, int]]  # path: size, mtime in ns


class Watch:
    """Remembers the outputs directory between runs, so that one look after each run is enough."""

    def __init__(self) -> None:
        self._known: Snapshot = {}
        self._folder_mtime = -1

    def forget_changes(self) -> None:
        """What is there now is not the next run's doing."""
        self.changes()

    def changes(self) -> list[tuple[str, int]]:
        """Files (path, size) that are new or changed since the last look. One system call while it is empty."""
        try:
            mtime = os.stat(OUTPUTS).st_mtime_ns
        except OSError:
            self._known = {}
            return []
        if not self._known and mtime == self._folder_mtime:
            return []
        self._folder_mtime = mtime
        before, self._known = self._known, _scan()
        return [(path, facts[0]) for path, facts in self._known.items() if before.get(path) != facts]


def _scan() -> Snapshot:
    found: Snapshot = {}
    folders = [OUTPUTS]
    while folders and len(found) < MAX_FILES:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if len(folders) < MAX_FILES:
                            folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        facts = entry.stat(follow_symlinks=False)
                        found[entry.path] = (facts.st_size, facts.st_mtime_ns)
                        if len(found) >= MAX_FILES:
                            break
        except OSError:
            continue
    return dict(sorted(found.items()))
