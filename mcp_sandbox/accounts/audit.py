"""The audit log of a shared server: who did what, one JSON object per line.

It has ids, names and outcomes. It never has code, content, paths, addresses of pages or tokens. Calls are logged by
the logger below, which `open_audit` gives a place to write to; without one nothing is written.
"""

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

from mcp.server.mcpserver.exceptions import ResourceError, ToolError, UnexpectedToolError

from mcp_sandbox.accounts.owners import LOCAL_OWNER, current_account
from mcp_sandbox.accounts.tokens import Token
from mcp_sandbox.errors import SandboxError

FILE = "audit.jsonl"  # in home/logs, where a build's log is called *.log and removed with it
FILE_BYTES = 10 << 20
OLD_FILES = 9
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

Face = Literal["mcp", "rest", "http"]

logger = logging.getLogger("mcp_sandbox.audit")
logger.propagate = False
logger.addHandler(logging.NullHandler())

client_address: ContextVar[str | None] = ContextVar("client_address", default=None)
_current: ContextVar["Entry | None"] = ContextVar("audit_entry", default=None)


@dataclass(slots=True)
class Entry:
    """What is known about a call before it ends."""

    face: Face
    action: str  # a tool, an operation, or what was refused
    sandbox: str | None = None
    run: str | None = None
    outcome: str = "ok"  # or an error's code

    def about(self, sandbox: object, run: object = None) -> None:
        """Name what the call is about, as the caller or its result names it. Anything but an id is left out."""
        self.sandbox = _id(sandbox) or self.sandbox
        self.run = _id(run) or self.run


@contextmanager
def audited(face: Face, action: str) -> Iterator[Entry]:
    """Log the call that the block carries out, with its duration."""
    entry = Entry(face, action)
    began = time.monotonic()
    previous = _current.set(entry)
    try:
        yield entry
    except BaseException as error:
        entry.outcome = outcome_of(error)
        raise
    finally:
        _current.reset(previous)
        record(entry, current_account(), time.monotonic() - began)


def note(sandbox: object, run: object = None) -> None:
    """Name what the current call is about, if there is one."""
    entry = _current.get()
    if entry is not None:
        entry.about(sandbox, run)


def record(entry: Entry, account: Token | None, took_s: float) -> None:
    """Write a line, if there is a place to write to."""
    if not logger.isEnabledFor(logging.INFO):
        return
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "owner": LOCAL_OWNER if account is None else account.owner,
        "token": None if account is None else account.name,
        "client": client_address.get(),
        "face": entry.face,
        "action": entry.action,
        "sandbox": entry.sandbox,
        "run": entry.run,
        "outcome": entry.outcome,
        "ms": round(took_s * 1000, 1),
    }
    logger.info("%s", json.dumps(line, ensure_ascii=False))


def outcome_of(error: BaseException) -> str:
    """Return the code of an error, however a face has wrapped it."""
    for each in (error, error.__cause__):
        if isinstance(each, SandboxError):
            return each.code
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    expected = isinstance(error, ToolError | ResourceError) and not isinstance(error, UnexpectedToolError)
    return "bad_request" if expected else "internal_error"


@contextmanager
def open_audit(home: Path, to: Literal["file", "stderr", "off"]) -> Iterator[None]:
    """Write the log during the block."""
    if to == "off":
        yield
        return
    handler = _PrivateFile(home / "logs" / FILE) if to == "file" else logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
        handler.close()


class _PrivateFile(RotatingFileHandler):
    """A file that only this user can read, and the files before it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and ID.fullmatch(value) else None
