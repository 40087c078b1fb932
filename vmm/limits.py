"""Ceilings on a whole machine, kept by the host's control groups, whichever of their two versions it has.

All groups lie in one folder called `mcp-sandbox`, below the group this process is in where that is possible, so that
limits somebody has put on us hold for our machines too.
"""

import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from vmm.types import Limits

FOLDER = "mcp-sandbox"
CPU_PERIOD_US = 100_000  # the kernel's own default
REMOVE_ATTEMPTS = 100  # times 10 ms: the kernel lets go of a group a moment after its last process was reaped
CONTROLLERS = ("memory", "cpu", "pids")
GROUP_NAME = re.compile(r"(\d+)-(\d+)-.+")  # process id and start time of the server whose machine it was


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where our groups are."""

    version: int | None  # 1, 2, or None: there are none we may use
    folders: tuple[Path, ...] = ()  # one for version 2, one for each controller of version 1
    reason: str = ""  # why version is None

    @property
    def usable(self) -> bool:
        return self.version is not None

    def describe(self) -> str:
        """One line for people."""
        return f"cgroup v{self.version}: {', '.join(CONTROLLERS)}" if self.usable else self.reason


def detect(mountinfo: str | None = None, own: str | None = None, *, root: Path = Path("/")) -> Hierarchy:
    """Find a place where groups with memory, cpu and pids controllers really can be made."""
    mounts, v2 = _mounts(Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo, root)
    paths = _own_paths(Path("/proc/self/cgroup").read_text() if own is None else own)
    reason = "this host has no control groups with memory, cpu and pids controllers"
    if v2 is not None and set(CONTROLLERS) <= set(_read(v2 / "cgroup.controllers").split()):
        for place in _upwards(v2, paths.get("", "/")):
            trouble = _try_v2(place / FOLDER)
            if trouble is None:
                return Hierarchy(2, (place / FOLDER,))
            reason = f"cgroup v2 is there, but no group can be made: {trouble}"
    elif set(CONTROLLERS) <= mounts.keys():
        found: list[Path] = []
        for name in CONTROLLERS:
            for place in (mounts[name] / paths.get(name, "/").lstrip("/"), mounts[name]):
                trouble = _try_v1(place / FOLDER)
                if trouble is None:
                    found.append(place / FOLDER)
                    break
                reason = f"cgroup v1 is there, but no group can be made: {trouble}"
        if len(found) == len(CONTROLLERS):
            return Hierarchy(1, tuple(found))
    return Hierarchy(None, reason=reason)


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


def _try_v1(folder: Path) -> str | None:
    """Make and remove a group; None, or what went wrong."""
    try:
        folder.mkdir(exist_ok=True)
        _probe_group(folder)
    except OSError as error:
        return f"{error.strerror} ({folder})"
    return None


def _try_v2(folder: Path) -> str | None:
    try:
        _make_v2(folder)
        _probe_group(folder)
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        return f"{error.strerror} ({folder})"
    return None


def _make_v2(folder: Path) -> None:
    """A folder whose groups have all controllers."""
    wanted = " ".join(f"+{name}" for name in CONTROLLERS)
    if not set(CONTROLLERS) <= set(_read(folder.parent / "cgroup.subtree_control").split()):
        (folder.parent / "cgroup.subtree_control").write_text(wanted)
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.subtree_control").write_text(wanted)


def _probe_group(folder: Path) -> None:
    group = folder / f"{_server()}-probe"
    group.mkdir()
    group.rmdir()


def _server() -> str:
    """This process, told apart from a later one with the same number."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def start_time(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if there is none."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    return stat.rpartition(")")[2].split()[19] if stat else None


def sweep(hierarchy: Hierarchy) -> list[str]:
    """Remove the groups of servers that were killed: their machines died with them. Says which."""
    removed = set()
    for folder in hierarchy.folders:
        for group in folder.glob("*-*-*"):
            owner = GROUP_NAME.fullmatch(group.name)
            if owner and start_time(int(owner[1])) != owner[2]:
                with suppress(OSError):  # somebody else was quicker, or it is not empty after all
                    group.rmdir()
                    removed.add(group.name)
    return sorted(removed)


class ControlGroup:
    """One machine's group, or rather one directory per controller."""

    def __init__(self, hierarchy: Hierarchy, name: str) -> None:
        self._version = hierarchy.version
        self._directories = [folder / f"{_server()}-{name}" for folder in hierarchy.folders]

    def create(self, limits: Limits) -> None:
        """Make the group and write its ceilings."""
        for directory in self._directories:
            if self._version == 2:
                _make_v2(directory.parent)
            else:
                directory.parent.mkdir(exist_ok=True)
            directory.mkdir()
            for file, value in settings(limits, self._version).items():
                if (directory / file).exists():
                    (directory / file).write_text(value)

    def add(self, pid: int) -> None:
        """Put a process, and all it will start, into the group."""
        for directory in self._directories:
            (directory / "cgroup.procs").write_text(str(pid))

    def out_of_memory(self) -> bool:
        """Whether the kernel had to kill something in the group because its memory was used up."""
        told = "".join(_read(place / file) for place in self._directories for file in OOM_FILES)
        return re.search(r"^oom_kill [1-9]", told, re.MULTILINE) is not None

    async def remove(self) -> None:
        """Kill what is still inside and take the group away."""
        with anyio.CancelScope(shield=True):
            for directory in self._directories:
                await remove_group(directory)


OOM_FILES = ("memory.events", "memory.oom_control")  # version 2, version 1


def settings(limits: Limits, version: int | None) -> dict[str, str]:
    """The files to write, in either version. One that a directory does not have belongs to another controller."""
    files: dict[str, str] = {}
    if limits.memory_bytes is not None:
        files["memory.max" if version == 2 else "memory.limit_in_bytes"] = str(limits.memory_bytes)
        if version == 2:
            files["memory.swap.max"] = "0"
    if limits.cpus != float("inf"):
        quota = int(limits.cpus * CPU_PERIOD_US)
        files |= (
            {"cpu.max": f"{quota} {CPU_PERIOD_US}"}
            if version == 2
            else {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": str(quota)}
        )
    if limits.pids is not None:
        files["pids.max"] = str(limits.pids)
    return files


@asynccontextmanager
async def control_group(hierarchy: Hierarchy, name: str, limits: Limits) -> AsyncIterator[ControlGroup | None]:
    """A group for one machine, or None where the host gives us none (`hierarchy.reason` says why)."""
    if not hierarchy.usable:
        yield None
        return
    group = ControlGroup(hierarchy, name)
    try:
        group.create(limits)
        yield group
    finally:
        await group.remove()


async def remove_group(directory: Path) -> None:
    """Kill what is in one directory of a group and take it away, if that can be done within a second."""
    for _ in range(REMOVE_ATTEMPTS):
        for pid in _read(directory / "cgroup.procs").split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # EBUSY: the last process is not quite gone
            await anyio.sleep(0.01)
        else:
            return


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
