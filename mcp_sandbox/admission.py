"""Who may have a machine and who waits: fair between owners, first come first served within one.

`FairQueue` decides and does nothing else; `Admission` lets people wait for its decisions.
"""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import anyio

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import LimitReached


@dataclass(frozen=True, slots=True)
class Limits:
    """How much there may be at once; None: no limit of its own."""

    sandboxes: int
    memory_mb: int | None = None
    owner_sandboxes: int | None = None
    owner_memory_mb: int | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            settings.max_sandboxes,
            settings.max_memory_mb,
            settings.max_owner_sandboxes,
            settings.max_owner_memory_mb,
        )


@dataclass(eq=False, slots=True)
class Ticket:
    """One machine's claim on the limits, from the moment it is asked for until nothing of it is left."""

    owner: str
    memory_mb: int
    passing: bool = False  # it will be given back soon: made for one run, or being closed


@dataclass(frozen=True, slots=True)
class Full:
    """A limit that has no room for a ticket."""

    setting: str
    value: int
    owned: bool  # it is the owner's own limit, not the one over all
    ever: bool  # the ticket would not even fit into an empty house


class FairQueue:
    """Tickets that hold a place, and lines of those that wait, one line an owner."""

    def __init__(self, limits: Limits) -> None:
        self.holders: list[Ticket] = []
        self._limits = limits
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()  # the first owner is the next to be served

    def join(self, ticket: Ticket) -> None:
        """Stand in line."""
        self._lines.setdefault(ticket.owner, deque()).append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Give back a place, or give up waiting for one."""
        if ticket in self.holders:
            self.holders.remove(ticket)
        else:
            self._take_out(ticket)

    def admit(self) -> list[Ticket]:
        """The tickets whose turn has come; they hold their places from now on."""
        admitted = []
        while ticket := self._next():
            self._take_out(ticket)
            if ticket.owner in self._lines:
                self._lines.move_to_end(ticket.owner)
            self.holders.append(ticket)
            admitted.append(ticket)
        return admitted

    def blocker(self, ticket: Ticket) -> Full | None:
        """The limit that keeps the ticket out, its owner's before those over all."""
        owned = [holder for holder in self.holders if holder.owner == ticket.owner]
        limits = self._limits
        return (
            _over("max_owner_sandboxes", limits.owner_sandboxes, len(owned), 1, owned=True)
            or _over("max_owner_memory_mb", limits.owner_memory_mb, _memory(owned), ticket.memory_mb, owned=True)
            or _over("max_sandboxes", limits.sandboxes, len(self.holders), 1, owned=False)
            or _over("max_memory_mb", limits.memory_mb, _memory(self.holders), ticket.memory_mb, owned=False)
        )

    def first_blocker(self) -> Full | None:
        """The limit everybody in line waits for, if there is one."""
        return next((full for line in self._lines.values() if (full := self.blocker(line[0]))), None)

    def hopeless(self, ticket: Ticket) -> bool:
        """Whether waiting cannot help: only the owner can make room, who waits for this very answer."""
        full = self.blocker(ticket)
        if full is None:
            return False
        in_the_way = [holder for holder in self.holders if holder.owner == ticket.owner or not full.owned]
        return full.ever or all(holder.owner == ticket.owner and not holder.passing for holder in in_the_way)

    def _next(self) -> Ticket | None:
        for line in self._lines.values():
            full = self.blocker(line[0])
            if full is None:
                return line[0]
            if not full.owned:
                return None  # nobody smaller passes by, or a large one would wait for ever
        return None

    def _take_out(self, ticket: Ticket) -> None:
        line = self._lines[ticket.owner]
        line.remove(ticket)
        if not line:
            del self._lines[ticket.owner]


def _memory(tickets: list[Ticket]) -> int:
    return sum(ticket.memory_mb for ticket in tickets)


def _over(setting: str, limit: int | None, used: int, wanted: int, *, owned: bool) -> Full | None:
    if limit is None or used + wanted <= limit:
        return None
    return Full(setting, limit, owned, ever=wanted > limit)


def _ignore(_setting: str) -> None:
    """For those who do not count."""


class Admission:
    """The queue with people in it."""

    def __init__(self, limits: Limits, timeout_s: float, on_refusal: Callable[[str], None] = _ignore) -> None:
        self._on_refusal = on_refusal  # told the setting
        self._queue = FairQueue(limits)
        self._timeout_s = timeout_s
        self._turns: dict[Ticket, anyio.Event] = {}

    @property
    def holders(self) -> list[Ticket]:
        """The tickets that have a place now."""
        return list(self._queue.holders)

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._turns) - len(self._queue.holders)

    @asynccontextmanager
    async def place(self, ticket: Ticket) -> AsyncIterator[None]:
        """A place within all limits, for as long as the block lasts.

        Raises:
            LimitReached: there was none in time, or waiting could not have helped.
        """
        turn = self._turns[ticket] = anyio.Event()
        self._queue.join(ticket)
        try:
            self._admit()
            if not turn.is_set():
                await self._wait(ticket, turn)
            yield
        finally:
            del self._turns[ticket]
            self._queue.leave(ticket)
            self._admit()

    def _admit(self) -> None:
        for ticket in self._queue.admit():
            self._turns[ticket].set()

    async def _wait(self, ticket: Ticket, turn: anyio.Event) -> None:
        if not self._queue.hopeless(ticket):
            with anyio.move_on_after(self._timeout_s):
                await turn.wait()
        if not turn.is_set():
            raise self._refusal(ticket)

    def _refusal(self, ticket: Ticket) -> LimitReached:
        full = self._queue.blocker(ticket) or self._queue.first_blocker()
        assert full is not None, "somebody waits only for a limit"
        self._on_refusal(full.setting)
        if full.ever:
            advice = f"A sandbox of this template takes {ticket.memory_mb} MB: name a smaller template."
        elif self._queue.hopeless(ticket):
            advice = "Close a sandbox with close_sandbox (list_sandboxes names them), then try again."
        else:
            advice = f"No place came free within {self._timeout_s:g} s. Try again later, or close a sandbox of yours."
        return LimitReached(full.setting, full.value, advice)
