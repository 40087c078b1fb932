"""Idempotency keys: a client that lost an answer asks again with the same key and gets it, and nothing happens twice.

The work of a request with a key goes on when its client leaves. Answers are kept in memory until others need the room.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import anyio
import anyio.abc
from anyio import AsyncContextManagerMixin
from starlette.responses import Response

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.rest.errors import KeyReused, TooManyKeys
from mcp_sandbox.rest.problems import answer_with, problem_of, refusal

MAX_KEPT_BYTES = 32 << 20  # of the answers of all owners; an answer with images has up to 3 MB
ANSWER_BYTES = 1024  # of Python's memory for each answer, besides its body
MAX_ACTIVE = 64  # of one owner: their clients may have left
NOTHING_DONE = frozenset({409, 429, 503})  # such an answer is not kept: the same request may succeed later
REPLAYED = "Idempotent-Replayed"

logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[Response]]


@dataclass(eq=False, slots=True)
class Entry:
    """The first request with a key, and its answer once there is one."""

    mark: bytes  # of the request
    done: anyio.Event = field(default_factory=anyio.Event)
    response: Response | None = None

    @property
    def size(self) -> int:
        """Roughly the memory that it takes."""
        return ANSWER_BYTES + (0 if self.response is None else len(self.response.body))


@dataclass(eq=False, slots=True)
class Owned:
    """The keys of one owner, with what they take: adding all up for each request would take ever longer."""

    entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)  # oldest first
    active: int = 0
    size: int = 0  # of those with an answer

    def done(self, key: str, entry: Entry) -> None:
        """Count an answer, or forget a key whose request may succeed later."""
        self.active -= 1
        if entry.response is None or entry.response.status_code in NOTHING_DONE:
            del self.entries[key]
        else:
            self.size += entry.size

    def forget_oldest(self) -> None:
        """Forget the oldest answer."""
        key, entry = next((key, entry) for key, entry in self.entries.items() if entry.done.is_set())
        del self.entries[key]
        self.size -= entry.size


class Keys(AsyncContextManagerMixin):
    """The keys of all owners. Leaving it cancels what is being carried out."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._owners: dict[str, Owned] = {}
        self._size = 0
        self._tasks: anyio.abc.TaskGroup

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        async with anyio.create_task_group() as self._tasks:
            try:
                yield self
            finally:
                self._tasks.cancel_scope.cancel()

    async def answer(self, owner: str, key: str, mark: bytes, work: Work) -> Response:
        """Do the work if this is the first request with the key, and return its answer.

        Raises:
            KeyReused, TooManyKeys: nothing was done.
        """
        own = self._owners.setdefault(owner, Owned())
        entry = own.entries.get(key)
        replayed = entry is not None
        if entry is None:
            if own.active >= MAX_ACTIVE:
                raise TooManyKeys(MAX_ACTIVE)
            entry = own.entries[key] = Entry(mark)
            own.active += 1
            self._tasks.start_soon(self._carry_out, own, key, entry, work)
        elif entry.mark != mark:
            raise KeyReused(key)
        await entry.done.wait()
        if entry.response is None:
            return refusal(503, "The server is about to stop.")
        first = entry.response
        headers = {**first.headers, REPLAYED: "true"} if replayed else dict(first.headers)
        return Response(first.body, first.status_code, headers)

    async def _carry_out(self, own: Owned, key: str, entry: Entry, work: Work) -> None:
        try:
            entry.response = await work()
        except SandboxError as error:
            entry.response = answer_with(problem_of(error))
        except Exception:
            logger.exception("a request with an idempotency key failed")
            entry.response = refusal(500)
        finally:
            entry.done.set()
            self._size -= own.size
            own.done(key, entry)
            self._size += own.size
            self._make_room()

    def _make_room(self) -> None:
        """Forget answers until the others fit: the oldest ones of the owner who has the most."""
        while self._size > self._max_bytes:
            heaviest = max(self._owners.values(), key=lambda own: own.size)
            self._size -= heaviest.size
            heaviest.forget_oldest()
            self._size += heaviest.size


def fingerprint(method: str, path: str, body: bytes) -> bytes:
    """Return what distinguishes a request from others with the same key."""
    return hashlib.sha256(b"\n".join((method.encode(), path.encode(), body))).digest()
