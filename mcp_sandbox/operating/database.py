"""The registry's file: its tables, how it is opened, and what is done when it cannot be.

Without a registry sandboxes still work, so nothing here stops a server: a broken file is moved aside, and where none
can be written the rows are kept in memory, which is as long as this server lives.
"""

import fcntl
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from mcp_sandbox.processes import ProcessId

FILE = "registry.db"
VERSION = 1
BUSY_S = 2.0  # other servers' writes take microseconds; one that takes longer was stopped in the middle
PRIVATE = 0o600  # it names owners

# NORMAL: a commit does not wait for the disk, only the rare checkpoint does. What a killed server has written is in
# the kernel's hands by then. A power cut may lose the last rows, and with them went all the machines they tell of.
PRAGMAS = ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON")
SCHEMA = """
CREATE TABLE IF NOT EXISTS servers (
    id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, started INTEGER NOT NULL, boot TEXT NOT NULL,
    namespace TEXT NOT NULL, home TEXT NOT NULL, folders TEXT NOT NULL, created REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS machines (
    id TEXT PRIMARY KEY, server INTEGER NOT NULL REFERENCES servers(id) ON DELETE CASCADE,
    template TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL, driver TEXT, machine_id TEXT,
    processes TEXT NOT NULL DEFAULT '[]', sandbox TEXT, owner TEXT
) STRICT;
"""

logger = logging.getLogger(__name__)


class MachineState(StrEnum):
    """Where a machine is in its life."""

    STARTING = "starting"
    RUNNING = "running"  # in a pool or in somebody's hands
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Server:
    """A process that has machines."""

    process: ProcessId
    boot: str
    namespace: str
    home: str
    folders: tuple[Path, ...]  # where its machines' control groups are
    created: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that is about to start, runs, or is about to end."""

    id: str  # of the row: it is there before the machine has an id
    template: str
    state: MachineState
    created: float
    driver: str | None = None
    machine_id: str | None = None
    processes: tuple[ProcessId, ...] = ()  # the first one holds all others, as far as they are known
    sandbox: str | None = None
    owner: str | None = None


class Entered(NamedTuple):
    """A registry with this server in it."""

    db: sqlite3.Connection
    key: int  # of this server's row
    complete: bool  # all servers of the home that are alive are in it, too


def enter(home: Path, server: Server) -> Entered:
    """The registry of `home` with a row for `server`."""
    try:
        with _lock(home):  # two servers that start together must not move each other's new file aside
            db, complete = _open_or_replace(home / FILE)
            return Entered(db, add_server(db, server), complete)
    except (OSError, sqlite3.Error) as error:
        logger.warning("no registry in %s (%s): machines of this server are known to nobody else", home, error)
        db = _connect(":memory:")
        return Entered(db, add_server(db, server), complete=False)


def _open_or_replace(path: Path) -> tuple[sqlite3.Connection, bool]:
    """The registry, and whether it is the one there was."""
    try:
        return _connect(str(path)), True
    except sqlite3.OperationalError:
        raise  # locked, not writable, disk full, or of another version: the file itself is fine
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
        logger.warning("%s is broken (%s): moved to %s, and a new one begun", path, error, aside.name)
        path.rename(aside)
        for suffix in ("-wal", "-shm"):  # they would be taken for the new file's
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _connect(str(path)), False


def _connect(path: str) -> sqlite3.Connection:
    if path != ":memory:":
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE))
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise sqlite3.OperationalError(f"it was written by another version of mcp-sandbox ({version})")
    for pragma in PRAGMAS:
        db.execute(f"PRAGMA {pragma}")
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")


def be_patient(db: sqlite3.Connection, *, patient: bool) -> None:
    """Whether to wait for another server's write."""
    db.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000) if patient else 0}")


@contextmanager
def _lock(home: Path) -> Iterator[None]:
    path = home / "locks" / "registry"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- rows --------------------------------------------------------------------------------------------------


def add_server(db: sqlite3.Connection, server: Server) -> int:
    """Write a server's row; its key."""
    values = (
        *(server.process.pid, server.process.started, server.boot, server.namespace, server.home),
        *(json.dumps([str(folder) for folder in server.folders]), server.created),
    )
    columns = "pid, started, boot, namespace, home, folders, created"
    key = db.execute(f"INSERT INTO servers ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values).lastrowid  # noqa: S608
    assert key is not None
    return key


def drop_server(db: sqlite3.Connection, server: Server) -> None:
    """Remove a server's rows and those of its machines."""
    where = (server.process.pid, server.process.started, server.boot, server.created)
    db.execute("DELETE FROM servers WHERE pid = ? AND started = ? AND boot = ? AND created = ?", where)


def add_machine(db: sqlite3.Connection, server: int, machine: Machine) -> None:
    """Write the row of a machine that is about to start."""
    values = (machine.id, server, machine.template, machine.state, machine.created)
    db.execute("INSERT INTO machines (id, server, template, state, created) VALUES (?, ?, ?, ?, ?)", values)


def update_machine(db: sqlite3.Connection, machine: Machine) -> None:
    """Write what is known by now; a machine that has no row any more gets none."""
    db.execute(
        "UPDATE machines SET state = ?, driver = ?, machine_id = ?, processes = ?, sandbox = ?, owner = ? WHERE id = ?",
        (
            *(machine.state, machine.driver, machine.machine_id),
            json.dumps([(process.pid, process.started) for process in machine.processes]),
            *(machine.sandbox, machine.owner, machine.id),
        ),
    )


def drop_machine(db: sqlite3.Connection, entry: str) -> None:
    """Remove a machine's row."""
    db.execute("DELETE FROM machines WHERE id = ?", (entry,))


def read_all(db: sqlite3.Connection) -> dict[Server, list[Machine]]:
    """All servers and their machines, oldest first."""
    servers = {
        key: Server(ProcessId(pid, started), boot, namespace, home, tuple(map(Path, json.loads(folders))), created)
        for key, pid, started, boot, namespace, home, folders, created in db.execute(
            "SELECT id, pid, started, boot, namespace, home, folders, created FROM servers ORDER BY id"
        )
    }
    found: dict[Server, list[Machine]] = {server: [] for server in servers.values()}
    columns = "server, id, template, state, created, driver, machine_id, processes, sandbox, owner"
    for key, *row in db.execute(f"SELECT {columns} FROM machines ORDER BY created"):  # noqa: S608
        if key in servers:  # else it came with a server that was added after we looked
            found[servers[key]].append(_machine(*row))
    return found


def _machine(entry: str, template: str, state: str, created: float, *rest: str | None) -> Machine:
    driver, machine_id, processes, sandbox, owner = rest
    tree = tuple(ProcessId(pid, started) for pid, started in json.loads(processes or "[]"))
    return Machine(entry, template, MachineState(state), created, driver, machine_id, tree, sandbox, owner)


def look(home: Path) -> dict[Server, list[Machine]]:
    """What the registry of `home` says, for those who only want to look. Nothing if there is none to read."""
    path = home / FILE
    if not path.exists():
        return {}
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as db:
            return read_all(db)
    except (sqlite3.Error, ValueError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return {}
