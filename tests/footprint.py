"""What machines and servers have on this host: processes, cgroups, mounts, open files, network links."""

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from mcp_sandbox.config import load_settings
from tests.waiting import assert_soon_empty, promised
from vmm.hierarchy import detect
from vmm.limits import installation
from vmm.network.plan import LINK_PREFIX
from vmm.network.tables import NFT
from vmm.process import find_tool

INIT = 1


def groups_of(pid: int) -> list[Path]:
    """The cgroups that a machine's process is in; none where the host gives us none, or when it has ended."""
    every = (group for folder in detect().folders for group in folder.iterdir() if group.is_dir())
    return sorted(group for group in every if pid in _members(group))


def groups(run_dir: Path) -> set[Path]:
    """The cgroups of all machines of a home, known by its run directory."""
    return {group for folder in detect().folders for group in folder.glob(f"*-{installation(run_dir)}-*")}


def empty_groups() -> set[Path]:
    """The cgroups of this process's home that have no process in them."""
    return {group for group in groups(load_settings().run_dir) if not _members(group)}


def network(run_dir: Path) -> list[str]:
    """The links and nftables tables of this process's network that belong to machines of a home."""
    links = Path("/sys/class/net").glob(f"{LINK_PREFIX}*/ifalias")
    named = [f"link {path.parent.name} {path.read_text().strip()}" for path in links]
    if os.geteuid() == 0 and find_tool(NFT) is not None:
        named += subprocess.run([NFT, "list", "tables"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in named if installation(run_dir) in line]


def mounts(*paths: Path) -> list[str]:
    """Return the mounts of this process's namespace that name one of the paths, by default this process's home."""
    words = [str(path).replace(" ", r"\040") for path in paths or (load_settings().home,)]
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if any(word in line for word in words)]


def descriptors() -> list[str]:
    """Return the open descriptors of this process that belong to machines."""
    found, home = [], str(load_settings().home)
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the directory
            target = str(link.readlink())
            if target.startswith(("/memfd:", "socket:", "pipe:", home)) or "(deleted)" in target:
                found.append(target)
    return sorted(found)


def processes_with(*paths: Path) -> Iterator[str]:
    """The processes whose environment, arguments or open files name one of the paths, but for this process."""
    words = [str(path) for path in paths]
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError), process.oneshot():
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            named = (*process.environ().values(), *process.cmdline(), *(file.path for file in process.open_files()))
            if any(word in name for word in words for name in named):
                yield f"{process.pid}: {' '.join(process.cmdline())}"


async def assert_gone(processes: Iterable[psutil.Process], groups: Iterable[Path], run_dir: Path) -> None:
    """Wait until all of it is gone, at most as long as promised."""
    processes, groups = list(processes), list(groups)

    def left() -> list[object]:
        return [
            *(process for process in processes if not has_ended(process)),
            *(group for group in groups if group.exists()),
            *files_in(run_dir),
        ]

    await assert_soon_empty(left, promised())


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended and been reaped, as far as that is up to its parent.

    The host's init reaps orphans of killed processes when it likes: on some hosts it looks for them every few seconds.
    """
    with suppress(psutil.NoSuchProcess):
        orphaned = process.status() == psutil.STATUS_ZOMBIE and process.ppid() == INIT
        return orphaned or not process.is_running()
    return True


async def assert_no_more_empty_groups(before: set[Path]) -> None:
    """No machine, known or not, has left its cgroup behind. A cgroup is empty for a moment when it is made, too."""
    await assert_soon_empty(lambda: empty_groups() - before, promised())


def files_in(directory: Path) -> list[Path]:
    """Return the files in a directory except sockets: a killed server's stays until the next one starts."""
    return [path for path in (directory.iterdir() if directory.exists() else ()) if not path.is_socket()]


def _members(group: Path) -> set[int]:
    with suppress(OSError):  # it was removed just now
        return set(map(int, (group / "cgroup.procs").read_text().split()))
    return set()
