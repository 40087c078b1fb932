"""A record of all machines on disk, for operators and for recovery after a crash.

    <home>/registry.db     a row for each server of this home, and one for each of their machines

A machine has its row from before it starts until it has ended, so the rows of a killed server name everything it may
have left. All servers of a home share the file. A server writes in one thread, in order, and seldom waits for it.
"""

import asyncio
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import anyio
import anyio.to_thread

from guest.client.streams import ServeStream
from mcp_sandbox.machines.provider import Frozen, Lease, MachineRequest, Provider, ProviderLayer
from mcp_sandbox.operating import database
from mcp_sandbox.operating.database import Machine, MachineState, Server
from vmm.process_table import is_alive, of_pid, tree_of

ADD_TIMEOUT_S = 0.5  # longest wait for a machine's first row; without it, recovery finds the machine by its cgroup
WARN_EVERY_S = 60.0  # with a full disk or a lock, almost every write fails

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ServerStatus(Enum):
    """Whether a server is alive, as far as this process can tell."""

    ALIVE = auto()
    GONE = auto()
    UNKNOWN = auto()  # it runs in another PID namespace


def this_server(home: Path, folders: tuple[Path, ...] = ()) -> Server:
    """Describe this process as a server of `home` whose machines have their cgroups in `folders`."""
    process = of_pid(os.getpid())
    assert process is not None
    # A reboot ends everything. A container that shares the home has its own PIDs. The registry of a copied home lists
    # machines of the original.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = str(Path("/proc/self/ns/pid").readlink())
    return Server(process, boot, namespace, _home_id(home), folders, time.time())


def _home_id(home: Path) -> str:
    try:
        home.mkdir(parents=True, exist_ok=True)
        status = home.stat()
    except OSError:  # there is no registry in it either
        return "nowhere"
    return f"{status.st_dev}:{status.st_ino}"


def status_of(server: Server, here: Server) -> ServerStatus:
    """Tell whether `server` is alive, as seen from the process `here`."""
    if server.boot != here.boot or server.home != here.home:
        return ServerStatus.GONE
    if server.namespace != here.namespace:
        return ServerStatus.UNKNOWN
    return ServerStatus.ALIVE if is_alive(server.process) else ServerStatus.GONE


class Registry:
    """Writes the rows of this server and its machines, and reads those of all servers."""

    def __init__(self, home: Path, folders: tuple[Path, ...] = ()) -> None:
        """Open the registry of `home` and add this server. Blocks, usually for a few milliseconds."""
        self.server = this_server(home, folders)
        self._db, self._key, self.complete = database.open_database(home, self.server)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="registry")
        self._own: dict[str, Machine] = {}
        self._failing = False
        self._warn_at = 0.0

    def close(self) -> None:
        """Finish all writes and remove this server. Blocks."""
        self._do(lambda: database.delete_server(self._db, self.server))
        self._writer.shutdown(wait=True)
        self._db.close()

    def own(self) -> list[Machine]:
        """Return the machines of this server, from memory."""
        return list(self._own.values())

    async def read_all(self) -> dict[Server, list[Machine]]:
        """Return all servers of this home and their machines; empty if the registry cannot be read."""
        return await asyncio.wrap_future(self._do(lambda: database.read_all(self._db))) or {}

    async def remove(self, server: Server) -> None:
        """Remove a server that has left nothing behind."""
        await asyncio.wrap_future(self._do(lambda: database.delete_server(self._db, server)))

    # -- machines of this server ---------------------------------------------------------------------------

    async def starting(self, entry: str, template: str) -> None:
        """Add a machine that is about to start. Only this write is waited for, usually about 0.1 ms."""
        machine = self._own[entry] = Machine(entry, template, MachineState.STARTING, time.time())
        written = asyncio.wrap_future(self._do(lambda: database.add_machine(self._db, self._key, machine)))
        with anyio.move_on_after(ADD_TIMEOUT_S):
            await asyncio.shield(written)  # a late row is still written

    def started(self, entry: str, driver: str, machine_id: str, pid: int | None) -> None:
        """Record that a machine runs, and its processes."""
        first = of_pid(pid) if pid is not None else None
        self._change(
            replace(
                self._own[entry],
                state=MachineState.RUNNING,
                driver=driver,
                machine_id=machine_id,
                processes=(first,) if first else (),
            )
        )

    def claimed(self, machine_id: str, sandbox: str, owner: str) -> None:
        """Record the sandbox that a machine belongs to."""
        for machine in self.own():
            if machine.machine_id == machine_id:
                self._change(replace(machine, sandbox=sandbox, owner=owner))

    def ending(self, entry: str) -> None:
        """Record that a machine is being torn down."""
        self._change(replace(self._own[entry], state=MachineState.ENDING))

    def ended(self, entry: str) -> None:
        """Remove a machine of which nothing is left."""
        self._own.pop(entry, None)
        self._do(lambda: database.delete_machine(self._db, entry))

    def _change(self, machine: Machine) -> None:
        self._own[machine.id] = machine

        def write() -> None:
            # Finding all its processes reads many small files: too slow for the event loop.
            tree = tree_of(machine.processes[0].pid) if machine.processes else ()
            database.update_machine(self._db, replace(machine, processes=tree or machine.processes))

        self._do(write)

    def _do(self, work: Callable[[], T]) -> Future[T | None]:
        """Run `work` in the writer thread, after all earlier work. A failing database is only logged."""

        def guarded() -> T | None:
            try:
                result = work()
            except (sqlite3.Error, ValueError) as error:
                self._failed(error)
                return None
            if self._failing:
                self._failing = False
                database.set_busy_timeout(self._db, database.BUSY_TIMEOUT_S)
            return result

        return self._writer.submit(guarded)

    def _failed(self, error: Exception) -> None:
        """Stop waiting for locks until a write works again: the waits would add up and delay every start."""
        if not self._failing:
            self._failing = True
            database.set_busy_timeout(self._db, 0)
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_EVERY_S
            logger.warning("cannot write to the registry: %s", error)


@asynccontextmanager
async def open_registry(home: Path, folders: tuple[Path, ...] = ()) -> AsyncIterator[Registry]:
    """Open the registry of `home`; this server is in it as long as the block lasts."""
    registry = await anyio.to_thread.run_sync(Registry, home, folders)
    try:
        yield registry
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(registry.close)


@runtime_checkable
class HasPid(Protocol):
    """A machine that is a process on this host."""

    @property
    def pid(self) -> int: ...


class Registered(ProviderLayer):
    """Keeps every machine of a source in the registry, from before it starts until it has ended."""

    def __init__(self, source: Provider, registry: Registry) -> None:
        super().__init__(source)
        self._registry = registry

    def acquire(self, request: MachineRequest) -> AbstractAsyncContextManager[Lease]:
        """Lease a machine and record it."""
        return self._recorded(request.template, self._source.acquire(request))

    def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: ServeStream | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Restore a saved state and record the machine."""
        source = self._source.thaw(frozen, copy=copy, serve_stream=serve_stream)
        return self._recorded(frozen.template.name, source)

    @asynccontextmanager
    async def _recorded(self, template: str, source: AbstractAsyncContextManager[Lease]) -> AsyncIterator[Lease]:
        """Yield the lease of `source` and keep its record up to date."""
        entry = f"m-{secrets.token_hex(8)}"
        try:
            await self._registry.starting(entry, template)
            async with source as lease:
                pid = lease.machine.pid if isinstance(lease.machine, HasPid) else None
                self._registry.started(entry, lease.host.driver, lease.machine.id, pid)
                try:
                    yield lease
                finally:
                    self._registry.ending(entry)
        finally:
            self._registry.ended(entry)
