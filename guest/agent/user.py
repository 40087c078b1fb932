"""The unprivileged user whose code a machine runs."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH103, PTH118

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from guest.places import CACHE, CONFIG, OUTPUTS, SETTINGS, WORKSPACE

NOBODY = 65534


class User(NamedTuple):
    """Whose rights code and file requests have. None for both: those of the agent itself (tests)."""

    uid: int | None
    gid: int | None

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Do something with this user's rights; the agent has one thread, so nothing else happens meanwhile."""
        if self.uid is None or self.gid is None:
            yield
            return
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)

    def become(self) -> None:
        """Give up all other rights, for good."""
        if self.uid is not None and self.gid is not None:
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)

    def sweep(self) -> None:
        """Kill everything this user runs. Never as another user; only in a process that ends with it."""
        if self.uid is not None and self.gid is not None:
            os.setgroups([])
            os.setgid(self.gid)
            os.setresuid(NOBODY, self.uid, NOBODY)  # its right to kill, without being anybody it may kill
            os.kill(-1, signal.SIGKILL)

    def make_places(self) -> None:
        """Create the user's directories and make everything in them theirs."""
        for place in (WORKSPACE, OUTPUTS, CONFIG, CACHE, SETTINGS):
            os.makedirs(place, exist_ok=True)
            if self.uid is None or self.gid is None:
                continue
            os.chown(place, self.uid, self.gid)
            for folder, names, files in os.walk(place):
                for name in (*names, *files):
                    with suppress(OSError):
                        os.lchown(os.path.join(folder, name), self.uid, self.gid)


def parse_user(name: str) -> User:
    """`UID:GID`, or `none` for the agent's own."""
    if name == "none":
        return User(None, None)
    uid, _, gid = name.partition(":")
    return User(int(uid), int(gid))
