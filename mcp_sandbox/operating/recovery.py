"""Remove what killed servers have left on this host.

Machines die with their server, and their files have no names, so what is left is mostly empty cgroups, a control socket
and the frozen states of paused sandboxes. A process that missed its death signal is killed here. Processes and files
are touched only if they provably belong to a dead server of this home: by the server's row in the registry, the pid and
start time of a process, or the name of a cgroup or file, which begins with pid and start time of the server. Empty
cgroups and nftables tables of dead servers of any home are removed: the home may be gone.
"""

import fcntl
import logging
import os
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import anyio
import anyio.to_thread

from mcp_sandbox.operating.database import Machine, Server
from mcp_sandbox.operating.registry import Registry, ServerStatus, status_of
from templates.removal import remove_tree
from templates.store import Store
from vmm import limits
from vmm.hierarchy import FOLDER
from vmm.network import tables
from vmm.process_table import ProcessId, is_alive, of_pid

KILL_TIMEOUT_S = 5.0  # a process killed with SIGKILL ends in milliseconds unless the host's disk hangs
OWNED = re.compile(r"(\d+)-(\d+)-.+")  # names of cgroups and files begin with pid and start time of their server

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Cleaned:
    """What recovery removed, one line per item."""

    servers: list[str] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)

    def note(self, kind: list[str], item: str) -> None:
        """Add and log one item."""
        kind.append(item)
        logger.info("removed %s", item)

    def __str__(self) -> str:
        kinds = ((kind.name, getattr(self, kind.name)) for kind in fields(self))
        return ", ".join(f"{kind}: {len(items)}" for kind, items in kinds if items) or "nothing"


async def recover(registry: Registry, run_dir: Path, store: Store) -> Cleaned:
    """Remove what dead servers of this home have left, unless another process is doing it."""
    cleaned = Cleaned()
    with _lock(store.home) as locked:
        if not locked:
            return cleaned
        here = registry.server
        known = await registry.read_all()
        for server, machines in known.items():
            if status_of(server, here) is ServerStatus.GONE:
                await _recover_server(registry, server, machines, cleaned)
        kept = {server.process for server in known if status_of(server, here) is not ServerStatus.GONE}
        if registry.complete and here in known:  # otherwise there may be unknown servers in other PID namespaces
            await anyio.to_thread.run_sync(_remove_files, run_dir, kept, cleaned)
        await anyio.to_thread.run_sync(_sweep, store, here.folders, cleaned)
        for table in await tables.sweep():
            cleaned.note(cleaned.tables, f"nftables table {table}")
    if str(cleaned) != "nothing":
        logger.warning("cleaned up after killed servers: %s", cleaned)
    return cleaned


async def _recover_server(registry: Registry, server: Server, machines: list[Machine], cleaned: Cleaned) -> None:
    left: list[object] = []
    if server.boot == registry.server.boot and server.home == registry.server.home:
        # Children first: when the first process of a PID namespace dies, all others in it do.
        tree = [process for machine in machines for process in reversed(machine.processes)]
        left += await _kill(tree, cleaned)
        left += await _remove_groups(server, cleaned)
    if left:  # keep its row: the next server tries again
        logger.warning("cannot clean up after server %d: %s", server.process.pid, left)
        return
    await registry.remove(server)
    cleaned.note(cleaned.servers, f"the record of server {server.process.pid} and {len(machines)} machines")


async def _kill(processes: Iterable[ProcessId], cleaned: Cleaned) -> list[object]:
    """Kill the processes that are alive, and return those that did not end."""
    left: list[object] = []
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except OSError:
            continue
        try:
            if not is_alive(process):  # checked after opening the handle, which pins the pid
                continue
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            with anyio.move_on_after(KILL_TIMEOUT_S):
                await anyio.wait_readable(handle)
                cleaned.note(cleaned.processes, f"process {process.pid}")
                continue
            left.append(process)
        except OSError as error:
            left.append(f"process {process.pid}: {error}")
        finally:
            os.close(handle)
    return left


async def _remove_groups(server: Server, cleaned: Cleaned) -> list[object]:
    """Kill what is in the cgroups of a server's machines and remove them; return what is left."""
    left: list[object] = []
    for folder in server.folders:
        if folder.name != FOLDER:
            continue
        for group in folder.glob(f"{server.process.pid}-{server.process.started}-*"):
            left += await _kill(_members(group), cleaned)
            await limits.remove_group(group)
            if group.exists():
                left.append(group)
            else:
                cleaned.note(cleaned.groups, f"cgroup {group}")
    return left


def _members(group: Path) -> list[ProcessId]:
    try:
        pids = (group / "cgroup.procs").read_text().split()
    except OSError:
        return []
    return [process for pid in pids if (process := of_pid(int(pid)))]


def _remove_files(run_dir: Path, kept: set[ProcessId], cleaned: Cleaned) -> None:
    """Remove the sockets and scratch files of dead servers."""
    for path in run_dir.glob("*-*-*"):
        name = OWNED.fullmatch(path.name)
        owner = ProcessId(int(name[1]), int(name[2])) if name else None
        if owner is None or owner in kept or is_alive(owner):
            continue
        with suppress(OSError):
            remove_tree(path)
            cleaned.note(cleaned.files, f"{path}")


def _sweep(store: Store, folders: tuple[Path, ...], cleaned: Cleaned) -> None:
    """Remove what no registry lists: cgroups of servers whose home is gone, and incomplete builds."""
    for group in limits.sweep(folders):
        cleaned.note(cleaned.groups, f"cgroup {group}")
    before = set(store.home.glob("staging/*"))
    store.sweep()
    for path in sorted(before - set(store.home.glob("staging/*"))):
        cleaned.note(cleaned.files, f"{path}")


@contextmanager
def _lock(home: Path) -> Iterator[bool]:
    """Try to lock the recovery of a home, and yield whether it worked."""
    path = home / "locks" / "recovery"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        logger.warning("cannot clean up in %s: %s", home, error)
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
