"""A user without any rights, for as long as a test lasts, and programs that run as that user.

The interpreter and the checkout may be closed to that user, see `checkout`. The programs run in a mount namespace of
their own, in which both can be reached: a directory that other users may not enter is covered by an open one.
"""

import os
import pwd
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.footprint import has_ended
from tests.functional.checkout import REPO, folders, readable

OTHERS_MAY_ENTER = 0o001
BASE = Path("/var/tmp")  # on disk, and every user may enter it


@dataclass(frozen=True, slots=True)
class OrdinaryUser:
    """A user who owns a home directory and nothing else."""

    name: str
    uid: int
    home: Path

    def command(self, argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return the command that runs `argv` as this user, with these environment variables alone."""
        # Temporary files, too, are removed with the user.
        places = {"HOME": str(self.home), "TMPDIR": str(self.home)}
        variables = {**places, "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1", **environment}
        become = (
            *("setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--init-groups", "env", "-i"),
            *(f"{name}={value}" for name, value in variables.items()),
        )
        script = " && ".join([*_open_checkout(self.home / "stage"), f"cd {_quoted(REPO)}", 'exec "$@"'])
        return ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", *become, *argv]

    def processes(self) -> list[int]:
        """Return what runs as this user."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if process.uids().real == self.uid and not has_ended(process):
                    found.append(process.pid)
        return found

    def give(self, tree: Path) -> None:
        """Make this user the owner of everything in `tree`."""
        subprocess.run(["chown", "-hR", f"{self.uid}:{self.uid}", str(tree)], check=True)


@contextmanager
def ordinary_user() -> Iterator[OrdinaryUser]:
    """Create a user; remove the user and all their files afterwards."""
    name = f"mcp-test-{secrets.token_hex(4)}"
    home = BASE / name
    subprocess.run(["useradd", "--create-home", "--home-dir", str(home), "--user-group", name], check=True)
    try:
        yield OrdinaryUser(name, pwd.getpwnam(name).pw_uid, home)
    finally:
        subprocess.run(["userdel", name], check=True)
        shutil.rmtree(home)


def _open_checkout(stage: Path) -> Iterator[str]:
    """Shell commands after which every user can reach and read what tests need."""
    closed: dict[Path, list[Path]] = {}
    for folder in folders():
        closed_parents = (path for path in reversed(folder.parents) if not path.stat().st_mode & OTHERS_MAY_ENTER)
        if (covered := next(closed_parents, None)) is not None:
            closed.setdefault(covered, []).append(folder)
        elif readable(folder) != folder:
            yield f"mount --bind {_quoted(readable(folder))} {_quoted(folder)}"
    for covered, needed in closed.items():
        places = [(_quoted(folder), _quoted(stage / str(number))) for number, folder in enumerate(needed)]
        yield f"mkdir -p {_quoted(stage)} && mount -t tmpfs tmpfs {_quoted(stage)}"
        for folder, (_, place) in zip(needed, places, strict=True):
            yield f"mkdir {place} && mount --bind {_quoted(readable(folder))} {place}"
        yield f"mount -t tmpfs -o mode=755 tmpfs {_quoted(covered)}"
        for target, place in places:
            yield f"mkdir -p {target} && mount --bind {place} {target} && umount {place}"
        yield f"umount {_quoted(stage)}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
