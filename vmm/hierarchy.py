"""Find out where this host lets us limit machines: in cgroups of either version, or in systemd scopes.

All our cgroups are in one folder called `mcp-sandbox`. It is below the cgroup of this process where that is possible,
so that limits on this process hold for its machines, too.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vmm import scopes
from vmm.process import probe_child
from vmm.process_table import of_pid

FOLDER = "mcp-sandbox"
CONTROLLERS = ("memory", "cpu", "pids")
SCOPES_MUST_HAVE = {"memory", "pids"}  # older versions of systemd do not delegate cpu to users
RELEASE_S = 0.5  # the kernel releases a cgroup a moment after its last process was reaped


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """What this host limits machines with."""

    version: int | None  # of the cgroups that we may create: 1, 2, or None
    folders: tuple[Path, ...] = ()  # the folder for cgroups: one for version 2, one per controller for version 1
    reason: str = ""  # why version is None
    manager: Path | None = None  # the runtime directory of the user's systemd, if that creates cgroups for us
    controllers: tuple[str, ...] = CONTROLLERS  # what can be limited

    @property
    def usable(self) -> bool:
        return self.version is not None or self.manager is not None

    def describe(self) -> str:
        """Return one line that says what limits machines."""
        if self.version is not None:
            return f"cgroup v{self.version}: {', '.join(self.controllers)}"
        if self.manager is not None:
            return f"systemd user scopes: {', '.join(self.controllers)}"
        return f"only per-process limits: {self.reason}"

    def gap(self) -> str | None:
        """Return one line that says what is not limited, or None."""
        if not self.usable:
            return f"no host-side limits on a machine's memory, CPU and processes as a whole: {self.reason}"
        missing = ", ".join(name for name in CONTROLLERS if name not in self.controllers)
        return f"no host-side limit on {missing}: systemd does not delegate it (Delegate=)" if missing else None


@cache
def detect() -> Hierarchy:
    """Return what this host has, found by trying it. Cached: a process stays in its cgroup."""
    found = find(read(Path("/proc/self/mountinfo")), read(Path("/proc/self/cgroup")))
    manager = None if found.usable or os.geteuid() == 0 else scopes.find_manager(os.environ)
    return found if manager is None else with_scopes(found, manager, scopes.controllers(manager))


def with_scopes(found: Hierarchy, manager: Path, in_force: set[str]) -> Hierarchy:
    """Return a hierarchy of systemd scopes if they limit enough, else `found`."""
    if not in_force >= SCOPES_MUST_HAVE:
        return found
    return Hierarchy(None, (), found.reason, manager, tuple(name for name in CONTROLLERS if name in in_force))


def try_folder(folder: Path) -> None:
    """Create a cgroup in `folder`, move a process into it, and remove both; raise OSError if that fails.

    Creating a cgroup proves too little: in a login session the kernel lets users do that, and then refuses the move.
    """
    group = folder / f"{server()}-probe"
    group.mkdir()
    try:
        with probe_child(["cat"]) as child:
            (group / "cgroup.procs").write_text(str(child.pid))
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    until = time.monotonic() + RELEASE_S
    while time.monotonic() < until:
        with suppress(OSError):
            return group.rmdir()
        time.sleep(0.001)
    return None


def find(
    mountinfo: str, own: str, *, root: Path = Path("/"), try_folder: Callable[[Path], None] = try_folder
) -> Hierarchy:
    """Find folders in which cgroups with all controllers accept our processes."""
    v1, v2 = _mounts(mountinfo, root)
    paths = _own_paths(own)
    if v2 is not None and set(CONTROLLERS) <= set(read(v2 / "cgroup.controllers").split()):
        folder, trouble = _first(_upwards(v2, paths.get("", "/")), make_v2, try_folder)
        return Hierarchy(2, (folder,)) if folder else Hierarchy(None, reason=f"cgroup v2 is mounted, but {trouble}")
    if not set(CONTROLLERS) <= v1.keys():
        return Hierarchy(None, reason="this host has no cgroups with memory, cpu and pids controllers")
    folders = []
    for name in CONTROLLERS:
        folder, trouble = _first((v1[name] / paths.get(name, "/").lstrip("/"), v1[name]), make_v1, try_folder)
        if folder is None:
            return Hierarchy(None, reason=f"cgroup v1 is mounted, but {trouble}")
        folders.append(folder)
    # Version 1 has a freezer, too, but its frozen processes cannot be killed: they would outlive the server.
    freezer = _first(_upwards(v2, paths.get("", "/")), make_v1, try_folder)[0] if v2 else None
    return Hierarchy(1, (*folders, freezer) if freezer else tuple(folders))


def _first(
    places: Iterable[Path], make: Callable[[Path], None], try_folder: Callable[[Path], None]
) -> tuple[Path | None, str]:
    """Return the first folder that can be created and works; or None and the error of the last one."""
    trouble = ""
    for place in places:
        folder = place / FOLDER
        try:
            make(folder)
            try_folder(folder)
        except OSError as error:
            trouble = f"no process can be moved into a new cgroup: {error.strerror} ({folder})"
            with suppress(OSError):  # another process may have cgroups in it
                folder.rmdir()
        else:
            return folder, ""
    return None, trouble


def make_v1(folder: Path) -> None:
    """Create a folder for cgroups of version 1."""
    folder.mkdir(exist_ok=True)


def make_v2(folder: Path) -> None:
    """Create a folder whose cgroups have all controllers."""
    wanted = " ".join(f"+{name}" for name in CONTROLLERS)
    if not set(CONTROLLERS) <= set(read(folder.parent / "cgroup.subtree_control").split()):
        (folder.parent / "cgroup.subtree_control").write_text(wanted)
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.subtree_control").write_text(wanted)


def _mounts(mountinfo: str, root: Path) -> tuple[dict[str, Path], Path | None]:
    """Return where each controller of version 1 is mounted, and where version 2 is."""
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
    """Return the cgroup of this process by controller; that of version 2 has an empty name."""
    return {
        name: path
        for _, names, path in (line.split(":", 2) for line in text.splitlines() if line)
        for name in names.split(",")
    }


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield a cgroup and all above it: one that contains processes cannot delegate controllers, one above it may."""
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
    """Return the text of a kernel file; nothing if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
