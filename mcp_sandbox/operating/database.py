"""The registry's SQLite file: its tables, its rows, and how it is opened.

Sandboxes work without a registry, so nothing here stops a server. A broken file is moved aside. If no file can be
written, the rows are kept in memory.
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

from vmm.process_table import ProcessId

FILE = "registry.db"
VERSION = 1
BUSY_TIMEOUT_S = 2.0  # a write takes microseconds; a server that takes longer was stopped in the middle
PRIVATE = 0o600  # the rows name owners

# NORMAL: commits do not wait for the disk, only the rare checkpoint does. The rows of a killed server are in the page
# cache. A power cut may lose the last rows, but then their machines are gone too.
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
    """The state of a machine."""

    STARTING = "starting"
    RUNNING = "running"  # pooled or leased
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Server:
    """A server process, the owner of machines."""

    process: ProcessId
    boot: str
    namespace: str
    home: str
    folders: tuple[Path, ...]  # the parents of its machines' cgroups
    created: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The record of a machine."""

    id: str  # of the record, which exists before the machine has an id
    template: str
    state: MachineState
    created: float
    driver: str | None = None
    machine_id: str | None = None
    processes: tuple[ProcessId, ...] = ()  # as far as they are known; the others are descendants of the first
    sandbox: str | None = None
    owner: str | None = None


class Opened(NamedTuple):
    """A registry that has a row for this server."""

    db: sqlite3.Connection
    key: int  # of this server's row
    complete: bool  # it has a row for every live server of the home


def open_database(home: Path, server: Server) -> Opened:
    """Open the registry of `home` and add a row for `server`."""
    try:
        with _lock(home):  # two servers starting together must not move each other's new file aside
            db, complete = _open_or_replace(home / FILE)
            return Opened(db, add_server(db, server), complete)
    except (OSError, sqlite3.Error) as error:
        logger.warning(
            "cannot open the registry in %s (%s): other processes will not see this server's machines", home, error
        )
        db = _connect(":memory:")
        return Opened(db, add_server(db, server), complete=False)


def _open_or_replace(path: Path) -> tuple[sqlite3.Connection, bool]:
    """Connect to the registry; return also whether it is the existing one."""
    try:
        return _connect(str(path)), True
    except sqlite3.OperationalError:
        raise  # locked, read-only, disk full or another version: the file itself is fine
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
        logger.warning("%s is corrupt (%s): moved it to %s and started a new one", path, error, aside.name)
        path.rename(aside)
        for suffix in ("-wal", "-shm"):  # SQLite would apply them to the new file
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _connect(str(path)), False


def _connect(path: str) -> sqlite3.Connection:
    if path != ":memory:":
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE))
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        _prepare(db)
    except BaseException:
        db.close()
        raise
    return db


def connect(home: Path) -> sqlite3.Connection:
    """Connect to the registry of `home` for other tables than those of machines.

    Raises:
        OSError, sqlite3.Error: it cannot be used.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _connect(str(home / FILE))


def _prepare(db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise sqlite3.OperationalError(f"written by another version of mcp-sandbox: schema {version}")
    for pragma in PRAGMAS:
        db.execute(f"PRAGMA {pragma}")
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")


def set_busy_timeout(db: sqlite3.Connection, seconds: float) -> None:
    """Set how long to wait for another server's write."""
    db.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


@contextmanager
def _lock(home: Path) -> Iterator[None]:
    path = home / "locks" / "registry"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- rows --------------------------------------------------------------------------------------------------


def add_server(db: sqlite3.Connection, server: Server) -> int:
    """Add a server's row and return its key."""
    values = (
        *(server.process.pid, server.process.started, server.boot, server.namespace, server.home),
        *(json.dumps([str(folder) for folder in server.folders]), server.created),
    )
    columns = "pid, started, boot, namespace, home, folders, created"
    key = db.execute(f"INSERT INTO servers ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values).lastrowid  # noqa: S608
    assert key is not None
    return key


def delete_server(db: sqlite3.Connection, server: Server) -> None:
    """Delete a server's row and those of its machines."""
    where = (server.process.pid, server.process.started, server.boot, server.created)
    db.execute("DELETE FROM servers WHERE pid = ? AND started = ? AND boot = ? AND created = ?", where)


def add_machine(db: sqlite3.Connection, server: int, machine: Machine) -> None:
    """Add the row of a machine that is about to start."""
    values = (machine.id, server, machine.template, machine.state, machine.created)
    db.execute("INSERT INTO machines (id, server, template, state, created) VALUES (?, ?, ?, ?, ?)", values)


def update_machine(db: sqlite3.Connection, machine: Machine) -> None:
    """Update a machine's row, if it still has one."""
    db.execute(
        "UPDATE machines SET state = ?, driver = ?, machine_id = ?, processes = ?, sandbox = ?, owner = ? WHERE id = ?",
        (
            *(machine.state, machine.driver, machine.machine_id),
            json.dumps([(process.pid, process.started) for process in machine.processes]),
            *(machine.sandbox, machine.owner, machine.id),
        ),
    )


def delete_machine(db: sqlite3.Connection, entry: str) -> None:
    """Delete a machine's row."""
    db.execute("DELETE FROM machines WHERE id = ?", (entry,))


def read_all(db: sqlite3.Connection) -> dict[Server, list[Machine]]:
    """Return all servers and their machines, oldest first."""
    servers = {
        key: Server(ProcessId(pid, started), boot, namespace, home, tuple(map(Path, json.loads(folders))), created)
        for key, pid, started, boot, namespace, home, folders, created in db.execute(
            "SELECT id, pid, started, boot, namespace, home, folders, created FROM servers ORDER BY id"
        )
    }
    found: dict[Server, list[Machine]] = {server: [] for server in servers.values()}
    columns = "server, id, template, state, created, driver, machine_id, processes, sandbox, owner"
    for key, *row in db.execute(f"SELECT {columns} FROM machines ORDER BY created"):  # noqa: S608
        if key in servers:  # otherwise the server was added after the first query
            found[servers[key]].append(_machine(*row))
    return found


def _machine(entry: str, template: str, state: str, created: float, *rest: str | None) -> Machine:
    driver, machine_id, processes, sandbox, owner = rest
    tree = tuple(ProcessId(pid, started) for pid, started in json.loads(processes or "[]"))
    return Machine(entry, template, MachineState(state), created, driver, machine_id, tree, sandbox, owner)


def read_home(home: Path) -> dict[Server, list[Machine]]:
    """Return all servers and machines of `home` without writing to it; empty if there is no readable registry."""
    path = home / FILE
    if not path.exists():
        return {}
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)) as db:
            return read_all(db)
    except (sqlite3.Error, ValueError) as error:
        logger.warning("cannot read %s: %s", path, error)
        return {}
