"""Where this host lets us put machines under ceilings: control groups of either version, or scopes of systemd.

All groups lie in one folder called `mcp-sandbox`, below the group this process is in where that is possible, so that
limits somebody has put on us hold for our machines too.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vmm import scopes
from vmm.process import bystander
from vmm.process_table import of_pid

FOLDER = "mcp-sandbox"
CONTROLLERS = ("memory", "cpu", "pids")
SCOPES_MUST_HAVE = {"memory", "pids"}  # older versions of systemd hand users no cpu controller
LET_GO_S = 0.5  # the kernel lets go of a group a moment after its last process was reaped


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """What holds our machines."""

    version: int | None  # of the control groups we may make ourselves: 1, 2, or None
    folders: tuple[Path, ...] = ()  # where: one for version 2, one for each controller of version 1
    reason: str = ""  # why version is None
    manager: Path | None = None  # where the user's systemd can be reached, who makes groups for us if we may not
    controllers: tuple[str, ...] = CONTROLLERS  # what a group can put a ceiling on

    @property
    def usable(self) -> bool:
        return self.version is not None or self.manager is not None

    def describe(self) -> str:
        """One line for people: what is in force."""
        if self.version is not None:
            return f"cgroup v{self.version}: {', '.join(self.controllers)}"
        if self.manager is not None:
            return f"scopes of systemd's user manager: {', '.join(self.controllers)}"
        return f"only limits on single processes: {self.reason}"

    def gap(self) -> str | None:
        """What is not in force, in words for people."""
        if not self.usable:
            return f"no host-side limits on a machine's memory, CPU and processes as a whole: {self.reason}"
        missing = ", ".join(name for name in CONTROLLERS if name not in self.controllers)
        return f"no host-side limit on {missing}: systemd does not hand it to users (Delegate=)" if missing else None


@cache
def detect() -> Hierarchy:
    """What this host gives us, from having tried it. Once: a process stays where it is."""
    found = find(read(Path("/proc/self/mountinfo")), read(Path("/proc/self/cgroup")))
    manager = None if found.usable or os.geteuid() == 0 else scopes.find_manager(os.environ)
    return found if manager is None else with_scopes(found, manager, scopes.controllers(manager))


def with_scopes(found: Hierarchy, manager: Path, in_force: set[str]) -> Hierarchy:
    """The same with groups that systemd makes, if they are worth having."""
    if not in_force >= SCOPES_MUST_HAVE:
        return found
    return Hierarchy(None, (), found.reason, manager, tuple(name for name in CONTROLLERS if name in in_force))


def take_in(folder: Path) -> None:
    """Make a group in `folder`, put a process into it, and remove both. OSError says why that cannot be done.

    Making a group is not enough: in a login session the kernel lets users make some and refuses to move processes in.
    """
    group = folder / f"{server()}-probe"
    group.mkdir()
    try:
        with bystander(["cat"]) as child:
            (group / "cgroup.procs").write_text(str(child.pid))
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    until = time.monotonic() + LET_GO_S
    while time.monotonic() < until:
        with suppress(OSError):
            return group.rmdir()
        time.sleep(0.001)
    return None


def find(mountinfo: str, own: str, *, root: Path = Path("/"), take_in: Callable[[Path], None] = take_in) -> Hierarchy:
    """A place for groups with memory, cpu and pids controllers that take in processes of ours."""
    v1, v2 = _mounts(mountinfo, root)
    paths = _own_paths(own)
    if v2 is not None and set(CONTROLLERS) <= set(read(v2 / "cgroup.controllers").split()):
        folder, trouble = _first(_upwards(v2, paths.get("", "/")), make_v2, take_in)
        return Hierarchy(2, (folder,)) if folder else Hierarchy(None, reason=f"cgroup v2 is there, but {trouble}")
    if not set(CONTROLLERS) <= v1.keys():
        return Hierarchy(None, reason="this host has no control groups with memory, cpu and pids controllers")
    folders = []
    for name in CONTROLLERS:
        folder, trouble = _first((v1[name] / paths.get(name, "/").lstrip("/"), v1[name]), make_v1, take_in)
        if folder is None:
            return Hierarchy(None, reason=f"cgroup v1 is there, but {trouble}")
        folders.append(folder)
    # Version 1 has a freezer too, but a process frozen by it cannot be killed: it would outlive its server.
    freezer = _first(_upwards(v2, paths.get("", "/")), make_v1, take_in)[0] if v2 else None
    return Hierarchy(1, (*folders, freezer) if freezer else tuple(folders))


def _first(
    places: Iterable[Path], make: Callable[[Path], None], take_in: Callable[[Path], None]
) -> tuple[Path | None, str]:
    """The first folder for groups that can be made and works; or None and what went wrong with the last one."""
    trouble = ""
    for place in places:
        folder = place / FOLDER
        try:
            make(folder)
            take_in(folder)
        except OSError as error:
            trouble = f"no machine can be put into a group: {error.strerror} ({folder})"
            with suppress(OSError):  # somebody else may have groups in it
                folder.rmdir()
        else:
            return folder, ""
    return None, trouble


def make_v1(folder: Path) -> None:
    folder.mkdir(exist_ok=True)


def make_v2(folder: Path) -> None:
    """A folder whose groups have all controllers."""
    wanted = " ".join(f"+{name}" for name in CONTROLLERS)
    if not set(CONTROLLERS) <= set(read(folder.parent / "cgroup.subtree_control").split()):
        (folder.parent / "cgroup.subtree_control").write_text(wanted)
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.subtree_control").write_text(wanted)


def _mounts(mountinfo: str, root: Path) -> tuple[dict[str, Path], Path | None]:
    """Where version 1 has its controllers, and where version 2 is."""
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        place = root / mount.split()[4].lstrip("/")
        kind, _, options = source.split(maxsplit=2)
        if kind == "cgroup2":
            v2 = place
        elif kind == "cgroup":
            v1.update({name: place for name in CONTROLLERS if name in options.split(",")})
    return v1, v2


def _own_paths(text: str) -> dict[str, str]:
    """The group this process is in, by controller; version 2 has none by name."""
    return {
        name: path
        for _, names, path in (line.split(":", 2) for line in text.splitlines() if line)
        for name in names.split(",")
    }


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """A group and all above it: one with processes in it can have no groups with controllers, one above it may."""
    place = mount / path.lstrip("/")
    while place != mount:
        yield place
        place = place.parent
    yield mount


def server() -> str:
    """Return what the names of this process's cgroups begin with: its pid, its start time, and its pid namespace."""
    process = of_pid(os.getpid())
    assert process is not None
    return f"{process.pid}-{process.started}-{pid_namespace()}"


def pid_namespace() -> int:
    """Return the number of the namespace in which this process's pids mean anything."""
    return Path("/proc/self/ns/pid").stat().st_ino


def read(file: Path) -> str:
    """What a file of the kernel's says; nothing if it is not there."""
    try:
        return file.read_text()
    except OSError:
        return ""
