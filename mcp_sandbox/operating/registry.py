"""What machines exist, written to disk, so that a crash leaks nothing and an operator can see all of them.

    <home>/registry.db     one row for each server that uses this home, one for each machine of theirs

A machine has its row before it starts and until it has ended, so what is left of a killed server can be found by its
rows. All servers of a home share the file. A server writes in one thread, in order, and seldom waits for it.
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

from mcp_sandbox.machines.provider import Frozen, Lease, MachineRequest, Provider, ProviderLayer
from mcp_sandbox.operating import database
from mcp_sandbox.operating.database import Machine, MachineState, Server
from mcp_sandbox.processes import is_alive, of_pid, tree_of

INTEND_S = 0.5  # the longest a start waits for its row: without one it is found by its group and its server's death
WARN_EVERY_S = 60.0  # a full disk or a lock makes almost every write fail

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Fate(Enum):
    """What has become of a server, as far as this process can tell."""

    ALIVE = auto()
    GONE = auto()
    STRANGE = auto()  # its process numbers mean nothing here


def this_server(home: Path, folders: tuple[Path, ...] = ()) -> Server:
    """This process, as one of those that use `home`, with its control groups in `folders`."""
    process = of_pid(os.getpid())
    assert process is not None
    # A reboot ends everything. A container that shares our home has process numbers of its own. A copy of a home has
    # a registry that tells of machines which are not the copy's.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = str(Path("/proc/self/ns/pid").readlink())
    return Server(process, boot, namespace, _place(home), folders, time.time())


def _place(home: Path) -> str:
    try:
        home.mkdir(parents=True, exist_ok=True)
        status = home.stat()
    except OSError:  # then there is no registry in it either
        return "nowhere"
    return f"{status.st_dev}:{status.st_ino}"


def fate_of(server: Server, here: Server) -> Fate:
    """What has become of `server`, seen from `here`."""
    if server.boot != here.boot or server.home != here.home:
        return Fate.GONE
    if server.namespace != here.namespace:
        return Fate.STRANGE
    return Fate.ALIVE if is_alive(server.process) else Fate.GONE


class Registry:
    """The rows of this server and its machines, and a view of everybody's."""

    def __init__(self, home: Path, folders: tuple[Path, ...] = ()) -> None:
        """Open the registry of `home` and enter this server. Blocks, a few milliseconds as a rule."""
        self.server = this_server(home, folders)
        self._db, self._key, self.complete = database.enter(home, self.server)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="registry")
        self._own: dict[str, Machine] = {}
        self._failing = False
        self._warn_at = 0.0

    def close(self) -> None:
        """Write what is on its way, and take this server off the record. Blocks."""
        self._do(lambda: database.drop_server(self._db, self.server))
        self._writer.shutdown(wait=True)
        self._db.close()

    def own(self) -> list[Machine]:
        """The machines of this server, from memory."""
        return list(self._own.values())

    async def everything(self) -> dict[Server, list[Machine]]:
        """All servers of this home and their machines; empty if the registry cannot be read."""
        return await asyncio.wrap_future(self._do(lambda: database.read_all(self._db))) or {}

    async def forget(self, server: Server) -> None:
        """Take a server off the record of which nothing is left."""
        await asyncio.wrap_future(self._do(lambda: database.drop_server(self._db, server)))

    # -- the life of a machine -----------------------------------------------------------------------------

    async def intend(self, entry: str, template: str) -> None:
        """Put a machine on record that is about to start. This alone is waited for, about 0.1 ms as a rule."""
        machine = self._own[entry] = Machine(entry, template, MachineState.STARTING, time.time())
        written = asyncio.wrap_future(self._do(lambda: database.add_machine(self._db, self._key, machine)))
        with anyio.move_on_after(INTEND_S):
            await asyncio.shield(written)  # a row that is late is written all the same

    def started(self, entry: str, driver: str, machine_id: str, pid: int | None) -> None:
        """It runs, and its processes are known from now on."""
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
        """A machine of this server is somebody's sandbox now."""
        for machine in self.own():
            if machine.machine_id == machine_id:
                self._change(replace(machine, sandbox=sandbox, owner=owner))

    def ending(self, entry: str) -> None:
        """It is being taken down."""
        self._change(replace(self._own[entry], state=MachineState.ENDING))

    def ended(self, entry: str) -> None:
        """Nothing of it is left."""
        self._own.pop(entry, None)
        self._do(lambda: database.drop_machine(self._db, entry))

    def _change(self, machine: Machine) -> None:
        self._own[machine.id] = machine

        def write() -> None:
            # Looking for all its processes means reading many small files: not for the event loop.
            tree = tree_of(machine.processes[0].pid) if machine.processes else ()
            database.update_machine(self._db, replace(machine, processes=tree or machine.processes))

        self._do(write)

    def _do(self, work: Callable[[], T]) -> Future[T | None]:
        """Have the thread do it after all it has been given before. A database that fails stops nobody."""

        def guarded() -> T | None:
            try:
                result = work()
            except (sqlite3.Error, ValueError) as error:
                self._fails(error)
                return None
            if self._failing:
                self._failing = False
                database.be_patient(self._db, patient=True)
            return result

        return self._writer.submit(guarded)

    def _fails(self, error: Exception) -> None:
        """Do not wait for a lock again until something has worked: the waits would add up, and delay every start."""
        if not self._failing:
            self._failing = True
            database.be_patient(self._db, patient=False)
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_EVERY_S
            logger.warning("the registry fails: %s", error)


@asynccontextmanager
async def open_registry(home: Path, folders: tuple[Path, ...] = ()) -> AsyncIterator[Registry]:
    """The registry of `home`, with this server in it for as long as the block lasts."""
    registry = await anyio.to_thread.run_sync(Registry, home, folders)
    try:
        yield registry
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(registry.close)


@runtime_checkable
class HasPid(Protocol):
    """A machine that is a process of this host."""

    @property
    def pid(self) -> int: ...


class Registered(ProviderLayer):
    """Keeps every machine of a source in the registry, from before it starts until it has ended."""

    def __init__(self, source: Provider, registry: Registry) -> None:
        super().__init__(source)
        self._registry = registry

    def acquire(self, request: MachineRequest) -> AbstractAsyncContextManager[Lease]:
        """Lease a machine and record it."""
        return self.recorded(request.template, self._source.acquire(request))

    def thaw(self, frozen: Frozen, *, copy: bool) -> AbstractAsyncContextManager[Lease]:
        """Restore a saved state and record the machine."""
        return self.recorded(frozen.template.name, self._source.thaw(frozen, copy=copy))

    @asynccontextmanager
    async def recorded(self, template: str, source: AbstractAsyncContextManager[Lease]) -> AsyncIterator[Lease]:
        """The lease that `source` gives, on record for as long as there is anything of it."""
        entry = f"m-{secrets.token_hex(8)}"
        try:
            await self._registry.intend(entry, template)
            async with source as lease:
                pid = lease.machine.pid if isinstance(lease.machine, HasPid) else None
                self._registry.started(entry, lease.host.driver, lease.machine.id, pid)
                try:
                    yield lease
                finally:
                    self._registry.ending(entry)
        finally:
            self._registry.ended(entry)
