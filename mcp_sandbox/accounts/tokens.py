"""Bearer tokens of a shared server. The registry keeps their hashes only, so a copy of it opens nothing.

A token has 256 random bits, so a plain hash is enough: there is nothing to guess.
"""

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.operating.database import BUSY_TIMEOUT_S, connect, set_busy_timeout
from mcp_sandbox.sandboxes.admission import NO_QUOTA, Quota

Scope = Literal["read", "use", "operate"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "mcps_"  # lets secret scanners recognise a leaked token
SECRET_BYTES = 32
NAME_CHARS = 64
USED_EVERY_S = 60.0  # how exact the last use is: not every request writes
RECORD_WAIT_S = 0.02  # for another process's write
SCHEMA = """
CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY, hash BLOB NOT NULL UNIQUE, scopes TEXT NOT NULL, requests_per_minute INTEGER,
    created REAL NOT NULL, expires REAL, last_used REAL
) STRICT;
"""
LATER_COLUMNS = {"owner": "TEXT", "sandboxes": "INTEGER", "memory_mb": "INTEGER", "runs": "INTEGER"}
COLUMNS = "name, owner, scopes, sandboxes, memory_mb, runs, requests_per_minute, created, expires, last_used"


@dataclass(frozen=True, slots=True)
class Token:
    """What is known about a token."""

    name: str
    owner: str  # of the sandboxes that it creates; tokens with the same owner share them
    scopes: tuple[Scope, ...] = ("use",)
    quota: Quota = NO_QUOTA
    requests_per_minute: int | None = None  # None: the server's setting
    created: float = 0
    expires: float | None = None
    last_used: float | None = None

    def expired(self, now: float) -> bool:
        """Return whether the token has ended."""
        return self.expires is not None and now >= self.expires


@dataclass(eq=False)
class BadTokenName(SandboxError):
    """The name or the owner of a token is empty, too long, or has characters that logs should not have."""

    code = "bad_token_name"
    sentence = "Names of tokens and owners have 1 to {limit} printable characters, no | and no space at their ends."
    limit: int


@dataclass(eq=False)
class TokenExists(SandboxError):
    """Another token has this name."""

    code = "token_exists"
    sentence = "There is a token called {name!r} already."
    name: str


@dataclass(eq=False)
class TokenNotFound(SandboxError):
    """No token has this name."""

    code = "token_not_found"
    sentence = "There is no token called {name!r}."
    name: str


class Tokens:
    """The tokens of one home. Every method blocks for a fraction of a millisecond."""

    def __init__(self, home: Path) -> None:
        self._db = connect(home)
        self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA}")
        present = {row[1] for row in self._db.execute("PRAGMA table_info(tokens)")}
        for column, kind in LATER_COLUMNS.items():
            if column not in present:
                self._db.execute(f"ALTER TABLE tokens ADD COLUMN {column} {kind}")
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the registry."""
        self._db.close()

    def create(
        self,
        name: str,
        scopes: Sequence[Scope] = ("use",),
        *,
        owner: str | None = None,
        quota: Quota = NO_QUOTA,
        ttl_s: float | None = None,
        requests_per_minute: int | None = None,
    ) -> str:
        """Add a token and return it. It cannot be shown again. Its owner is its name unless another one is given.

        Raises:
            BadTokenName, TokenExists: there is no such token now.
        """
        owner = name if owner is None else owner
        if not (_is_name(name) and _is_name(owner)):
            raise BadTokenName(NAME_CHARS)
        secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        now = time.time()
        values = {
            "hash": _hash(secret),
            "name": name,
            "owner": owner,
            "scopes": json.dumps(list(scopes)),
            **asdict(quota),
            "requests_per_minute": requests_per_minute,
            "created": now,
            "expires": None if ttl_s is None else now + ttl_s,
        }
        places = ", ".join(f":{column}" for column in values)
        try:
            self._db.execute(f"INSERT INTO tokens ({', '.join(values)}) VALUES ({places})", values)  # noqa: S608
        except sqlite3.IntegrityError:
            raise TokenExists(name) from None
        return secret

    def all(self) -> list[Token]:
        """Return all tokens, by name."""
        return [_token(*row) for row in self._db.execute(f"SELECT {COLUMNS} FROM tokens ORDER BY name")]  # noqa: S608

    def revoke(self, name: str) -> None:
        """Remove a token: servers refuse it from their next request on.

        Raises:
            TokenNotFound: there is no such token.
        """
        if self._db.execute("DELETE FROM tokens WHERE name = ?", (name,)).rowcount == 0:
            raise TokenNotFound(name)

    def find(self, secret: str) -> Token | None:
        """Return the token with this secret, unless it has expired, and record its use."""
        now = time.time()
        found = self._db.execute(f"SELECT {COLUMNS} FROM tokens WHERE hash = ?", (_hash(secret),)).fetchone()  # noqa: S608
        token = _token(*found) if found else None
        if token is None or token.expired(now):
            return None
        if token.last_used is None or now - token.last_used > USED_EVERY_S:
            self._record_use(token.name, now)
        return token

    def _record_use(self, name: str, now: float) -> None:
        """Write when a token was used last, if that can be done at once: requests wait meanwhile."""
        set_busy_timeout(self._db, RECORD_WAIT_S)
        try:
            with suppress(sqlite3.Error):
                self._db.execute("UPDATE tokens SET last_used = ? WHERE name = ?", (now, name))
        finally:
            set_busy_timeout(self._db, BUSY_TIMEOUT_S)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def _is_name(text: str) -> bool:
    """Return whether a name may be in logs. Users of an OAuth issuer have owners with a |, which thus differ."""
    return 0 < len(text) <= NAME_CHARS and text.isprintable() and text == text.strip() and "|" not in text


def _token(name: str, owner: str | None, scopes: str, *rest: Any) -> Token:  # noqa: ANN401 - a row
    sandboxes, memory_mb, runs, requests_per_minute, created, expires, last_used = rest
    known = tuple(scope for scope in SCOPES if scope in json.loads(scopes))
    quota = Quota(sandboxes, memory_mb, runs)
    return Token(name, owner or name, known, quota, requests_per_minute, created, expires, last_used)
