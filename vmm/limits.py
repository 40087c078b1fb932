"""Ceilings on a whole machine, kept by the host's control groups, whichever of their two versions it has."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from vmm.types import Limits

PARENT = "mcp-sandbox"  # all groups of this product lie below one of this name
CPU_PERIOD_US = 100_000  # the kernel's own default
REMOVE_ATTEMPTS = 100  # times 10 ms: the kernel lets go of a group a moment after its last process was reaped
CONTROLLERS = ("memory", "cpu", "pids")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where this host keeps its control groups."""

    version: int | None  # 1, 2, or None: there are none we may use
    mounts: dict[str, Path]  # controller → its root directory
    reason: str = ""  # why version is None

    @property
    def usable(self) -> bool:
        return self.version is not None

    def describe(self) -> str:
        """One line for people."""
        return f"cgroup v{self.version}: {', '.join(self.mounts)}" if self.usable else self.reason


def detect(mountinfo: str | None = None, *, root: Path = Path("/")) -> Hierarchy:
    """Find the hierarchy that has memory, cpu and pids controllers and that we may write to."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in text.splitlines():
        mount, _, source = line.partition(" - ")
        place = root / mount.split()[4].lstrip("/")
        kind, _, options = source.split(maxsplit=2)
        if kind == "cgroup2":
            v2 = place
        elif kind == "cgroup":
            v1.update({name: place for name in CONTROLLERS if name in options.split(",")})
    if v2 is not None:
        offered = _read(v2 / "cgroup.controllers").split()
        if all(name in offered for name in CONTROLLERS):
            return _writable(Hierarchy(2, dict.fromkeys(CONTROLLERS, v2)))
    if all(name in v1 for name in CONTROLLERS):
        return _writable(Hierarchy(1, {name: v1[name] for name in CONTROLLERS}))
    return Hierarchy(None, {}, "this host has no control groups with memory, cpu and pids controllers")


def _writable(found: Hierarchy) -> Hierarchy:
    if all(os.access(place, os.W_OK) for place in found.mounts.values()):
        return found
    return Hierarchy(None, {}, f"cgroup v{found.version} is there, but only root may make groups in it")


class ControlGroup:
    """One machine's group, or rather one directory per controller."""

    def __init__(self, hierarchy: Hierarchy, name: str) -> None:
        self._hierarchy = hierarchy
        parents = {place / PARENT for place in hierarchy.mounts.values()}
        self._directories = [parent / name for parent in sorted(parents)]

    def create(self, limits: Limits) -> None:
        """Make the group and write its ceilings."""
        for directory in self._directories:
            directory.parent.mkdir(exist_ok=True)
            if self._hierarchy.version == 2:
                wanted = " ".join(f"+{name}" for name in CONTROLLERS)
                for above in (directory.parent.parent, directory.parent):
                    (above / "cgroup.subtree_control").write_text(wanted)
            directory.mkdir()
            for file, value in settings(limits, self._hierarchy.version).items():
                if (directory / file).exists():
                    (directory / file).write_text(value)

    def add(self, pid: int) -> None:
        """Put a process, and all it will start, into the group."""
        for directory in self._directories:
            (directory / "cgroup.procs").write_text(str(pid))

    async def remove(self) -> None:
        """Kill what is still inside and take the group away."""
        with anyio.CancelScope(shield=True):
            for directory in self._directories:
                await _remove(directory)


def settings(limits: Limits, version: int | None) -> dict[str, str]:
    """The files to write, for either version; a file the directory does not have belongs to another controller."""
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


async def _remove(directory: Path) -> None:
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
