"""Logging on stderr, as text or JSON. Every record about a sandbox carries its id."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

_sandbox: ContextVar[str | None] = ContextVar("sandbox", default=None)


@contextmanager
def about(sandbox_id: str) -> Iterator[None]:
    """Add the sandbox's id to everything logged in the block and in tasks started by it."""
    token = _sandbox.set(sandbox_id)
    try:
        yield
    finally:
        _sandbox.reset(token)


def configure(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Log to stderr only, because stdout belongs to the protocol."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_add_sandbox)
    handler.setFormatter(_Json() if log_format == "json" else _Text("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _add_sandbox(record: logging.LogRecord) -> bool:
    """Set the record's sandbox, unless the caller has (`extra={"sandbox": …}`)."""
    if not hasattr(record, "sandbox"):
        record.sandbox = _sandbox.get()
    return True


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record)
        sandbox = getattr(record, "sandbox", None)
        return f"{line} [{sandbox}]" if sandbox and sandbox not in line else line


class _Json(logging.Formatter):
    """One JSON object per line, even for messages of several lines."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if sandbox := getattr(record, "sandbox", None):
            line["sandbox"] = sandbox
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
