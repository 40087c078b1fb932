"""Run a build's programs in namespaces of their own, in which the directories for temporary files are private.

mmdebstrap, buildah and skopeo leave files under predictable names in directories that every user of the host may write
to. Here they see directories of the build's own there, which go with the build.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vmm.errors import ToolMissing
from vmm.process import find_tool

COVERED = ("/tmp", "/var/tmp", "/dev/shm", "/run/user")  # noqa: S108 - none of them is used
EVERYONE = 0o1777  # inside a private directory: maintainer scripts and apt run as several users
# Takes pairs of a source and a target, then "--" and the program. Where /run has no /run/user to cover, root must not
# create one.
_MOUNT = """set -e
[ -d /run/user ] || [ ! -w /run ] || { mount --bind /run /run && mount -o remount,bind,ro /run; }
while [ "$1" != -- ]; do mount --rbind -- "$1" "$2"; shift 2; done
shift
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Private:
    """What a program gets of its own."""

    scratch: Path  # a directory on disk; it is created, and removed when the program has ended
    visible: tuple[Path, ...] = ()  # what the program needs, in case it is below a directory that is covered
    subordinate_ids: bool = True  # whether it creates files of several users, which ordinary users need these ids for


def in_own_namespaces(argv: Sequence[str], private: Private) -> list[str]:
    """Create the scratch directory; return a command that runs `argv` as root of its own pid and mount namespaces.

    Its processes and mounts end with it, and it is killed when this process dies. For an ordinary user it is root of a
    user namespace. The caller removes the scratch directory.
    """
    if (program := find_tool(argv[0])) is None:
        raise ToolMissing(argv[0])
    users: list[str] = []
    if os.geteuid() != 0:
        users = ["--map-root-user", *(["--map-auto"] if private.subordinate_ids else [])]
    mounts = [str(path) for pair in _mounts(private) for path in pair]
    return [
        *("setpriv", "--pdeathsig=KILL", "unshare", *users, "--mount", "--pid", "--mount-proc", "--fork"),
        *("--kill-child=KILL", "sh", "-c", _MOUNT, "sh", *mounts, "--", program, *argv[1:]),
    ]


def _mounts(private: Private) -> Iterator[tuple[Path, Path]]:
    """Create the private directories; yield what to mount where, in this order."""
    private.scratch.mkdir(mode=0o700)
    places = [Path(place) for place in COVERED if Path(place).is_dir()]
    for place in places:
        _inside(private.scratch, place).mkdir(parents=True)
        _inside(private.scratch, place).chmod(EVERYONE)
    needed = {path for given in (private.scratch, *private.visible) for path in (given.absolute(), given.resolve())}
    for path in sorted(needed):
        if path.exists() and any(path.is_relative_to(place) for place in places):
            target = _inside(private.scratch, path)
            (target if path.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                target.touch()
            yield path, target
    for place in places:
        yield _inside(private.scratch, place), place


def _inside(folder: Path, path: Path) -> Path:
    return folder / path.relative_to("/")
