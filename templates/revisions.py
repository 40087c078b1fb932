"""Which revision of an entry is current. `template update` makes a new revision to bring in newer packages.

An entry's key does not depend on the package versions in the archive, so a second build from the same inputs would find
the first one. A revision is one more input. It gives a new key to the entry and to everything made from it, so the old
entries stay for the machines that use them. All revisions are in one file: one rename switches every template at once.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from templates.store import Inputs, key_of

FILE_NAME = "revisions.json"  # in the home: the key of an entry without a revision -> its current revision


class Revisions:
    """The current revisions in a home. With `pending` ones it shows the store as it will be after `save`."""

    def __init__(self, home: Path, pending: Mapping[str, str] | None = None) -> None:
        self._file = home / FILE_NAME
        self._pending = dict(pending or {})

    def apply(self, inputs: Inputs) -> Inputs:
        """Return `inputs` with the current revision, if there is one."""
        revision = self.of(key_of(inputs))
        return {**inputs, "revision": revision} if revision else inputs

    def of(self, key: str) -> str | None:
        """Return the revision of the entry that would have this key without one."""
        return (self._stored() | self._pending).get(key)

    def save(self) -> None:
        """Make the pending revisions current."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(self._stored() | self._pending, indent=2, sort_keys=True) + "\n")
        new.replace(self._file)

    def stamp(self) -> int:
        """Return a value that changes with every `save`."""
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _stored(self) -> dict[str, str]:
        try:
            return dict(json.loads(self._file.read_text()))
        except FileNotFoundError:
            return {}


def next_revision(current: str | None, changes: Sequence[Sequence[str]]) -> str:
    """Return the revision that follows `current`. A repeated attempt at the same changes gets the same one."""
    return key_of({"after": current, "changes": changes})
