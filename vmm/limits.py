"""Ceilings on a whole machine, kept by the host. Drivers have one way to set them, whatever the host has for it:

async with control_group(detect(), name, Limits(...)) as group, spawn(group.wrap(argv), before_start=group.add):
"""

import hashlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import anyio

from vmm.hierarchy import Hierarchy, detect, make_v1, make_v2, pid_namespace, read, server
from vmm.process_table import ProcessId, is_alive
from vmm.scopes import find_scope, scope_argv
from vmm.types import Limits

__all__ = ["ControlGroup", "Hierarchy", "control_group", "detect", "rlimit_argv", "settings", "sweep"]

CPU_PERIOD_US = 100_000  # the kernel's own default
REMOVE_ATTEMPTS = 100  # times 10 ms: the kernel lets go of a group a moment after its last process was reaped
FREEZE_ATTEMPTS = 2000  # times 1 ms: the first does, unless a process waits for a disk that hangs
OOM_FILES = ("memory.events", "memory.oom_control")  # version 2, version 1
COUNTED_APART = (5, 14)  # since this Linux, a user's processes are counted in each user namespace by itself


class ControlGroup:
    """What holds one machine. This plain kind is for hosts without groups: it can only limit single processes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """The command to start instead of `argv`."""
        limits = self._limits
        processes = limits.pids if limits.alone else None
        return [*rlimit_argv(limits.file_bytes, limits.address_space_bytes, processes), *argv]

    def add(self, pid: int) -> None:
        """Take a process in, with all that it will start. To be called before it starts anything."""

    def directories(self) -> list[Path]:
        """Where the kernel tells of the group and is told."""
        return []

    def out_of_memory(self) -> bool:
        """Whether the kernel had to kill something in the group because its memory was used up."""
        told = "".join(read(place / file) for place in self.directories() for file in OOM_FILES)
        return re.search(r"^oom_kill [1-9]", told, re.MULTILINE) is not None

    async def freeze(self) -> bool:
        """Stop all processes of the group where they are; False if this host cannot. They can still be killed."""
        attempts = FREEZE_ATTEMPTS if self._write_freezer("1") else 0
        for _ in range(attempts):
            if any("frozen 1" in read(place / "cgroup.events") for place in self.directories()):
                return True
            await anyio.sleep(0.001)
        await self.thaw()
        return False

    async def thaw(self) -> None:
        """Let frozen processes go on."""
        self._write_freezer("0")

    async def remove(self) -> None:
        """Kill what is still inside and take the group away."""

    def _write_freezer(self, value: str) -> bool:
        files = [file for place in self.directories() if (file := place / "cgroup.freeze").exists()]
        for file in files:
            file.write_text(value)
        return bool(files)


class OwnGroup(ControlGroup):
    """A group that we have made: one directory, or one for each controller of version 1."""

    def __init__(self, limits: Limits, hierarchy: Hierarchy, name: str) -> None:
        super().__init__(limits)
        self._version = hierarchy.version
        self._directories = [folder / f"{server()}-{name}" for folder in hierarchy.folders]

    def create(self) -> None:
        """Make the group and write its ceilings."""
        for directory in self._directories:
            (make_v2 if self._version == 2 else make_v1)(directory.parent)
            directory.mkdir()
            for file, value in settings(self._limits, self._version).items():
                if (directory / file).exists():
                    (directory / file).write_text(value)

    def wrap(self, argv: Sequence[str]) -> list[str]:
        return [*rlimit_argv(self._limits.file_bytes), *argv]

    def add(self, pid: int) -> None:
        for directory in self._directories:
            (directory / "cgroup.procs").write_text(str(pid))

    def directories(self) -> list[Path]:
        return self._directories

    async def remove(self) -> None:
        with anyio.CancelScope(shield=True):
            for directory in self._directories:
                await remove_group(directory)


class SystemdScope(ControlGroup):
    """A group that the user's systemd makes when the machine starts, and takes away when it has ended."""

    def __init__(self, limits: Limits, manager: Path, name: str) -> None:
        super().__init__(limits)
        self._manager = manager
        self._unit = f"mcp-sandbox-{server()}-{name}"

    def wrap(self, argv: Sequence[str]) -> list[str]:
        command = [*rlimit_argv(self._limits.file_bytes), *argv]
        return scope_argv(self._manager, self._unit, self._limits, command)

    def directories(self) -> list[Path]:
        return find_scope(self._unit)

    async def remove(self) -> None:
        for directory in self.directories():
            _kill(directory)


@asynccontextmanager
async def control_group(hierarchy: Hierarchy, name: str, limits: Limits) -> AsyncIterator[ControlGroup]:
    """What holds one machine, for as long as the block lasts. Its process must end before the block does."""
    if hierarchy.manager is not None:
        group: ControlGroup = SystemdScope(limits, hierarchy.manager, name)
    elif hierarchy.usable:
        group = OwnGroup(limits, hierarchy, name)
    else:
        group = ControlGroup(limits)
    try:
        if isinstance(group, OwnGroup):
            group.create()
        yield group
    finally:
        await group.remove()


def machine_group(run_dir: Path, machine_id: str, limits: Limits) -> AbstractAsyncContextManager[ControlGroup]:
    """The same for a machine of the installation whose scratch is in `run_dir`."""
    return control_group(detect(), f"{installation(run_dir)}-{machine_id}", limits)


def rlimit_argv(
    file_bytes: int | None = None, address_space_bytes: int | None = None, processes: int | None = None
) -> list[str]:
    """The beginning of a command whose processes have these limits, each by itself. None of them dumps core.

    `processes` counts all of the same user in the same user namespace, so it is only for users or namespaces that have
    nothing else; older kernels count all of the user's, and there it is left out.
    """
    limits = {"core": 0, "fsize": file_bytes, "as": address_space_bytes}
    if counts_apart():
        limits["nproc"] = processes
    return ["prlimit", *(f"--{name}={value}" for name, value in limits.items() if value is not None)]


def counts_apart() -> bool:
    """Whether a limit on processes counts those of one machine alone: as root it has a user of its own."""
    major, minor, *_ = map(int, re.findall(r"\d+", os.uname().release))
    return os.geteuid() == 0 or (major, minor) >= COUNTED_APART


def settings(limits: Limits, version: int | None) -> dict[str, str]:
    """The files to write, in either version. One that a directory does not have belongs to another controller."""
    files: dict[str, str] = {}
    if limits.memory_bytes is not None:
        files["memory.max" if version == 2 else "memory.limit_in_bytes"] = str(limits.memory_bytes)
        # No swap on top. Version 1 counts both together, and its file must be written second.
        files |= {"memory.swap.max": "0"} if version == 2 else {"memory.memsw.limit_in_bytes": str(limits.memory_bytes)}
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


def installation(run_dir: Path) -> str:
    """Return the mark of a home, which is part of the names of its machines' cgroups."""
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]


def sweep(folders: Iterable[Path]) -> list[str]:
    """Remove the empty cgroups of servers that were killed, of any home; return their names.

    Cgroups of another pid namespace are left alone: from here their servers always look dead.
    """
    name = re.compile(rf"(\d+)-(\d+)-{pid_namespace()}-.+")
    removed = set()
    for folder in folders:
        for group in folder.glob("*-*-*"):
            owner = name.fullmatch(group.name)
            if owner and not is_alive(ProcessId(int(owner[1]), int(owner[2]))):
                with suppress(OSError):  # another process removed it, it is another user's, or it is not empty
                    group.rmdir()
                    removed.add(group.name)
    return sorted(removed)


async def remove_group(directory: Path) -> None:
    """Kill what is in one directory of a group and take it away, if that can be done within a second."""
    for _ in range(REMOVE_ATTEMPTS):
        _kill(directory)
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # EBUSY: the last process is not quite gone
            await anyio.sleep(0.01)
        else:
            return


def _kill(directory: Path) -> None:
    for pid in read(directory / "cgroup.procs").split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
