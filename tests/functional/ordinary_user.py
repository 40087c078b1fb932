"""A user without any rights, for as long as a test lasts, and programs run as that user.

The interpreter and the repo may lie where only root can go, such as below /root. What runs as the user sees them
nevertheless: in a mount namespace of its own an open directory, with nothing else in it, covers the closed one.
"""

import os
import pwd
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mcp_sandbox

REPO = Path(mcp_sandbox.__file__).parent.parent
OTHERS_MAY_ENTER = 0o001
BASE = Path("/var/tmp")  # on disk, and open to everybody
STAGE = "/mnt"


@dataclass(frozen=True, slots=True)
class OrdinaryUser:
    """Somebody who owns a home directory and nothing else."""

    name: str
    uid: int
    home: Path

    def command(self, argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """`argv` as this user, with these variables alone."""
        # Scratch files too go where they are removed with the user.
        places = {"HOME": str(self.home), "TMPDIR": str(self.home)}
        variables = {**places, "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1", **environment}
        become = (
            *("setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--init-groups", "env", "-i"),
            *(f"{name}={value}" for name, value in variables.items()),
        )
        script = " && ".join([*_uncover([Path(sys.base_prefix), Path(sys.prefix), REPO]), f'cd {REPO} && exec "$@"'])
        return ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", *become, *argv]

    def give(self, tree: Path) -> None:
        """Make everything in `tree` this user's."""
        subprocess.run(["chown", "-hR", f"{self.uid}:{self.uid}", str(tree)], check=True)


@contextmanager
def ordinary_user() -> Iterator[OrdinaryUser]:
    """A new user, who is gone afterwards with all that was theirs."""
    name = f"mcp-test-{secrets.token_hex(4)}"
    home = BASE / name
    subprocess.run(["useradd", "--create-home", "--home-dir", str(home), "--user-group", name], check=True)
    try:
        yield OrdinaryUser(name, pwd.getpwnam(name).pw_uid, home)
    finally:
        subprocess.run(["userdel", name], check=True)
        shutil.rmtree(home)


def _uncover(needed: Sequence[Path]) -> Iterator[str]:
    """Shell commands after which everybody can reach `needed`."""
    closed: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(needed):
        for directory in reversed(path.parents):
            if not directory.stat().st_mode & OTHERS_MAY_ENTER:
                closed.setdefault(directory, []).append(path)
                break
    if not closed:
        return
    yield f"mount -t tmpfs tmpfs {STAGE}"
    for directory, paths in closed.items():
        places = [(shlex.quote(str(path)), f"{STAGE}/{number}") for number, path in enumerate(paths)]
        for source, place in places:
            yield f"mkdir {place} && mount --bind {source} {place}"
        yield f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(directory))}"
        for source, place in places:
            yield f"mkdir -p {source} && mount --bind {place} {source} && umount {place} && rmdir {place}"
    yield f"umount {STAGE}"
