"""Limits on a whole machine, enforced by the host. Drivers set them in one way, whatever the host has:

async with control_group(detect(), name, Limits(...)) as group, spawn(group.wrap(argv), before_start=group.add):
"""

import hashlib
import math
import os
import re
import signal
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio

from vmm.hierarchy import Hierarchy, detect, make_v1, make_v2, pid_namespace, read, server
from vmm.process_table import ProcessId, is_alive
from vmm.scopes import find_scope, scope_argv
from vmm.types import CPU_PERIOD_US, CpuPriority, Limits

__all__ = ["ControlGroup", "Hierarchy", "control_group", "detect", "rlimit_argv", "settings", "sweep"]

# Weights, in percent of an ordinary cgroup's. All machines together yield to the server, and to the host's other work.
MACHINES_WEIGHT = 50
WEIGHTS = {  # among machines
    CpuPriority.STARTING: 100,
    CpuPriority.INTERACTIVE: 100,
    CpuPriority.BATCH: 20,
    CpuPriority.UNUSED: 4,
}
# More than the machine has, for its monitor or kernel, which works beside its code. Without it a call of 20 ms has to
# wait for its share of the next periods.
SHORT_USE_CPUS = 1
UNUSED_CPUS = 0.25  # enough for a service that waits, and for the agent's answer to a ping
NICENESS = 10  # of machines on hosts without cgroups
REMOVE_ATTEMPTS = 300  # times 10 ms: on a busy host the kernel releases a cgroup seconds after its last process ended
FREEZE_ATTEMPTS = 2000  # times 1 ms: the first succeeds, unless a process waits for a disk that hangs
OOM_FILES = ("memory.events", "memory.oom_control")  # version 2, version 1
NPROC_PER_NAMESPACE = (5, 14)  # the first Linux that counts a user's processes in each user namespace separately


class ControlGroup:
    """The limits of one machine. This base class is for hosts without cgroups: it limits each process by itself."""

    bounds_memory = False  # of the machine as a whole
    _version: int | None = None  # of its files
    _priority: CpuPriority | None = None  # as it was set last

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """Return the command to start instead of `argv`."""
        limits = self._limits
        processes = limits.pids if limits.own_user else None
        return ["nice", "-n", str(NICENESS), *rlimit_argv(limits.file_bytes, limits.data_bytes, processes), *argv]

    def add(self, pid: int) -> None:
        """Move a process in. Its later children will be in the cgroup, too."""

    def directories(self) -> list[Path]:
        """Return the directories of the cgroup."""
        return []

    def out_of_memory(self) -> bool:
        """Return whether the kernel killed a process of the cgroup because of its memory limit."""
        events = "".join(read(place / file) for place in self.directories() for file in OOM_FILES)
        return re.search(r"^oom_kill [1-9]", events, re.MULTILINE) is not None

    def prioritize(self, priority: CpuPriority) -> None:
        """Set how much CPU the machine gets. It takes effect at once."""
        if priority is self._priority:
            return
        with suppress(OSError):  # the machine has just ended
            self._write(cpu_settings(self._limits.cpus, priority, self._version))
            self._priority = priority

    @contextmanager
    def widened(self, more: int) -> Iterator[None]:
        """Let the machine take `more` bytes of memory for as long as the block lasts; end it if it keeps them."""
        if not self.bounds_memory or self._limits.memory_bytes is None:
            yield
            return
        wide = memory_settings(self._limits.memory_bytes + more, self._version)
        self._write(dict(reversed(wide.items())))
        try:
            yield
        finally:
            try:
                self._write(memory_settings(self._limits.memory_bytes, self._version))
            except OSError:  # version 1 refuses a limit below what is used; version 2 ends the machine by itself
                for directory in self.directories():
                    _kill(directory)
                raise

    async def freeze(self) -> bool:
        """Freeze all processes of the cgroup; return False if this host cannot. They can still be killed."""
        attempts = FREEZE_ATTEMPTS if self._write_freezer("1") else 0
        for _ in range(attempts):
            if any("frozen 1" in read(place / "cgroup.events") for place in self.directories()):
                return True
            await anyio.sleep(0.001)
        await self.thaw()
        return False

    async def thaw(self) -> None:
        """Let frozen processes run again."""
        with suppress(OSError):  # they have just ended
            self._write_freezer("0")

    async def remove(self) -> None:
        """Kill what is still in the cgroup and remove it."""

    def _write_freezer(self, value: str) -> bool:
        return self._write({"cgroup.freeze": value})

    def _write(self, files: Mapping[str, str]) -> bool:
        """Write the files that the cgroup has; return whether there were any."""
        found = [(path, value) for place in self.directories() for path, value in in_directory(place, files)]
        for path, value in found:
            path.write_text(value)
        return bool(found)


class OwnGroup(ControlGroup):
    """A cgroup that we create: one directory for version 2, one per controller for version 1."""

    bounds_memory = True

    def __init__(self, limits: Limits, hierarchy: Hierarchy, name: str) -> None:
        super().__init__(limits)
        self._version = hierarchy.version
        self._directories = [folder / f"{server()}-{name}" for folder in hierarchy.folders]

    def create(self) -> None:
        """Create the cgroup and write its limits."""
        for directory in self._directories:
            (make_v2 if self._version == 2 else make_v1)(directory.parent)
            for path, value in in_directory(directory.parent, weight_settings(MACHINES_WEIGHT, self._version)):
                path.write_text(value)
            directory.mkdir()
        self._write(settings(self._limits, self._version))

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
    """A cgroup that the user's systemd creates when the machine starts, and removes when it has ended."""

    bounds_memory = True

    def __init__(self, limits: Limits, manager: Path, name: str) -> None:
        super().__init__(limits)
        self._manager = manager
        self._version = 2
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
    """Create the cgroup of one machine for the duration of the block. The machine must end before the block does."""
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
    """Create the cgroup of a machine whose home has its scratch space in `run_dir`."""
    return control_group(detect(), f"{installation(run_dir)}-{machine_id}", limits)


def rlimit_argv(
    file_bytes: int | None = None, data_bytes: int | None = None, processes: int | None = None
) -> list[str]:
    """Return the beginning of a command that sets limits on each of its processes. None of them dumps core.

    The kernel counts `processes` by user and user namespace, so the machine must share neither with others. Older
    kernels count by user alone; there the limit is left out.
    """
    limits = {"core": 0, "fsize": file_bytes, "data": data_bytes}
    if nproc_is_per_machine():
        limits["nproc"] = processes
    return ["prlimit", *(f"--{name}={value}" for name, value in limits.items() if value is not None)]


def nproc_is_per_machine() -> bool:
    """Return whether RLIMIT_NPROC counts the processes of one machine. Machines of root have a user each."""
    major, minor, *_ = map(int, re.findall(r"\d+", os.uname().release))
    return os.geteuid() == 0 or (major, minor) >= NPROC_PER_NAMESPACE


def settings(limits: Limits, version: int | None) -> dict[str, str]:
    """Return the files to write for limits, with the priority of a machine that has just started."""
    files = {} if limits.memory_bytes is None else memory_settings(limits.memory_bytes, version)
    if limits.pids is not None:
        files["pids.max"] = str(limits.pids)
    return files | cpu_settings(limits.cpus, CpuPriority.STARTING, version)


def memory_settings(limit: int, version: int | None) -> dict[str, str]:
    """Return the files that limit memory, without any swap.

    Version 1 counts memory and swap together in the second file, which must not be below the first one at any time.
    """
    if version == 2:
        return {"memory.max": str(limit), "memory.swap.max": "0"}
    return {"memory.limit_in_bytes": str(limit), "memory.memsw.limit_in_bytes": str(limit)}


def cpu_settings(cpus: float, priority: CpuPriority, version: int | None) -> dict[str, str]:
    """Return the files that give a cgroup at most `cpus`, and its share of them when others want them."""
    if math.isinf(cpus):
        return {}
    if priority in (CpuPriority.STARTING, CpuPriority.INTERACTIVE):
        cpus += SHORT_USE_CPUS
    elif priority is CpuPriority.UNUSED:
        cpus = min(cpus, UNUSED_CPUS)
    quota = int(cpus * CPU_PERIOD_US)
    files = weight_settings(WEIGHTS[priority], version)
    if version == 2:
        return files | {"cpu.max": f"{quota} {CPU_PERIOD_US}"}
    return files | {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": str(quota)}


def weight_settings(weight: int, version: int | None) -> dict[str, str]:
    """Return the file that says how a cgroup shares CPUs. An ordinary one has weight 100, in version 1 1024 shares."""
    return {"cpu.weight": str(weight)} if version == 2 else {"cpu.shares": str(weight * 1024 // 100)}


def in_directory(directory: Path, files: Mapping[str, str]) -> list[tuple[Path, str]]:
    """Return the files that a cgroup's directory has. Others belong to controllers that are elsewhere or missing."""
    return [(path, value) for name, value in files.items() if (path := directory / name).exists()]


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
    """Kill what is in one directory of a cgroup and remove it; give up after three seconds."""
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
