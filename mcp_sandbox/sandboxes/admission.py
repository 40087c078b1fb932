"""Who may have a machine and who waits: fair between owners, first come first served within one.

`FairQueue` decides and does nothing else; `Admission` lets people wait for its decisions.
"""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Self

import anyio

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import LimitReached, NeverFits, QueueTimeout, SandboxLimit
from mcp_sandbox.machines.provider import UNLIMITED, Capacity


@dataclass(frozen=True, slots=True)
class Limits:
    """How much there may be at once; None: no limit of its own."""

    sandboxes: int
    memory_mb: int | None = None
    owner_sandboxes: int | None = None
    owner_memory_mb: int | None = None
    capacity: Capacity = UNLIMITED  # of the provider's hosts; it changes while a server runs

    @classmethod
    def of(cls, settings: Settings, capacity: Capacity) -> Self:
        return cls(
            settings.limits.sandboxes,
            settings.limits.memory_mb,
            settings.limits.owner_sandboxes,
            settings.limits.owner_memory_mb,
            capacity,
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
    changes: bool  # it may grow by itself: another host may join


Party = tuple[Ticket, ...]  # tickets of one owner that are served together or not at all


class FairQueue:
    """Tickets that hold a place, and lines of those that wait, one line an owner."""

    def __init__(self, limits: Limits) -> None:
        self.holders: list[Ticket] = []
        self.limits = limits
        self._lines: OrderedDict[str, deque[Party]] = OrderedDict()  # the first owner is the next to be served

    @property
    def waiting(self) -> int:
        """How many tickets stand in line."""
        return sum(len(party) for line in self._lines.values() for party in line)

    def join(self, *party: Ticket) -> None:
        """Stand in line, for as many places at once as there are tickets."""
        self._lines.setdefault(party[0].owner, deque()).append(party)

    def leave(self, ticket: Ticket) -> None:
        """Give back a place, or give up waiting for one, with all of the party."""
        if ticket in self.holders:
            self.holders.remove(ticket)
            return
        for party in self._lines.get(ticket.owner, ()):
            if ticket in party:
                self._take_out(party)
                return

    def admit(self) -> list[Ticket]:
        """The tickets whose turn has come; they hold their places from now on."""
        admitted: list[Ticket] = []
        while party := self._next():
            owner = party[0].owner
            self._take_out(party)
            if owner in self._lines:
                self._lines.move_to_end(owner)
            self.holders += party
            admitted += party
        return admitted

    def blocker(self, *party: Ticket) -> Full | None:
        """The limit that keeps the party out, its owner's before those over all."""
        owned = [holder for holder in self.holders if holder.owner == party[0].owner]
        count, memory_mb = len(party), _memory(party)
        held, held_mb = len(self.holders), _memory(self.holders)
        limits, capacity = self.limits, self.limits.capacity
        return (
            _over("limits.owner_sandboxes", limits.owner_sandboxes, len(owned), count, owned=True)
            or _over("limits.owner_memory_mb", limits.owner_memory_mb, _memory(owned), memory_mb, owned=True)
            or _over("limits.sandboxes", limits.sandboxes, held, count)
            or _over("limits.memory_mb", limits.memory_mb, held_mb, memory_mb)
            or _over("capacity.machines", capacity.machines, held, count, changes=True)
            or _over("capacity.memory_mb", capacity.memory_mb, held_mb, memory_mb, changes=True)
        )

    def first_blocker(self) -> Full | None:
        """The limit everybody in line waits for, if there is one."""
        return next((full for line in self._lines.values() if (full := self.blocker(*line[0]))), None)

    def hopeless(self, *party: Ticket) -> bool:
        """Whether waiting cannot help: only the owner can make room, who waits for this very answer."""
        full = self.blocker(*party)
        if full is None or full.changes:
            return False
        owner = party[0].owner
        in_the_way = [holder for holder in self.holders if holder.owner == owner or not full.owned]
        return full.ever or all(holder.owner == owner and not holder.passing for holder in in_the_way)

    def _next(self) -> Party | None:
        for line in self._lines.values():
            full = self.blocker(*line[0])
            if full is None:
                return line[0]
            if not full.owned:
                return None  # nobody smaller passes by, or a large one would wait for ever
        return None

    def _take_out(self, party: Party) -> None:
        owner = party[0].owner
        line = self._lines[owner]
        line.remove(party)
        if not line:
            del self._lines[owner]


def _memory(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.memory_mb for ticket in tickets)


def _over(
    setting: str, limit: int | None, used: int, wanted: int, *, owned: bool = False, changes: bool = False
) -> Full | None:
    if limit is None or used + wanted <= limit:
        return None
    return Full(setting, limit, owned, ever=wanted > limit and not changes, changes=changes)


def _ignore(_setting: str) -> None:
    """For those who do not count."""


class Admission:
    """The queue with people in it."""

    def __init__(self, limits: Limits, timeout_s: float, on_refusal: Callable[[str], None] = _ignore) -> None:
        self.on_refusal = on_refusal  # told the setting
        self._queue = FairQueue(limits)
        self._timeout_s = timeout_s
        self._turns: dict[Ticket, anyio.Event] = {}  # of those who wait

    @property
    def holders(self) -> list[Ticket]:
        """The tickets that have a place now."""
        return list(self._queue.holders)

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return self._queue.waiting

    def resize(self, limits: Limits) -> None:
        """Replace the limits. Those who wait are admitted at once if there is room now; nobody loses a place."""
        self._queue.limits = limits
        self._admit()

    @asynccontextmanager
    async def place(self, ticket: Ticket) -> AsyncIterator[None]:
        """A place within all limits, for as long as the block lasts.

        Raises:
            LimitReached: there was none in time, or waiting could not have helped.
        """
        async with self.places(ticket):
            yield

    @asynccontextmanager
    async def places(self, *party: Ticket) -> AsyncIterator[list[AsyncExitStack]]:
        """A place for each ticket, all of them or none. Whoever takes one over (`pop_all`) keeps it after the block.

        Raises:
            LimitReached: there was no room for all in time, or waiting could not have helped.
        """
        turn = anyio.Event()
        self._turns.update(dict.fromkeys(party, turn))
        self._queue.join(*party)
        async with AsyncExitStack() as stack:
            held = [await stack.enter_async_context(AsyncExitStack()) for _ in party]
            for place, ticket in zip(held, party, strict=True):
                place.callback(self._leave, ticket)
            self._admit()
            if not turn.is_set():
                await self._wait(party, turn)
            yield held

    def _leave(self, ticket: Ticket) -> None:
        self._turns.pop(ticket, None)
        self._queue.leave(ticket)
        self._admit()

    def _admit(self) -> None:
        for ticket in self._queue.admit():
            self._turns.pop(ticket).set()

    async def _wait(self, party: Party, turn: anyio.Event) -> None:
        if not self._queue.hopeless(*party):
            with anyio.move_on_after(self._timeout_s):
                await turn.wait()
        if not turn.is_set():
            raise self._refusal(party)

    def _refusal(self, party: Party) -> LimitReached:
        full = self._queue.blocker(*party) or self._queue.first_blocker()
        assert full is not None, "somebody waits only for a limit"
        self.on_refusal(full.setting)
        if full.ever:
            return NeverFits(full.setting, full.value, len(party), party[0].memory_mb)
        if self._queue.hopeless(*party):
            return SandboxLimit(full.setting, full.value)
        return QueueTimeout(full.setting, full.value, self._timeout_s)
