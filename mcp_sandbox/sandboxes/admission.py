"""Admission to the limits: fair between owners, first come first served within one owner.

`FairQueue` only decides; `Admission` lets callers wait for its decisions.
"""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Self

import anyio

from mcp_sandbox.config import LimitSettings
from mcp_sandbox.errors import LimitReached, NeverFits, QueueTimeout, SandboxLimit
from mcp_sandbox.machines.provider import UNLIMITED, Capacity


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be in use at once; None: no limit."""

    sandboxes: int
    memory_mb: int | None = None
    owner_sandboxes: int | None = None
    owner_memory_mb: int | None = None
    capacity: Capacity = UNLIMITED  # of the provider's hosts; it changes while a server runs

    @classmethod
    def of(cls, settings: LimitSettings, capacity: Capacity) -> Self:
        """Return the limits of the settings, within the capacity of the hosts."""
        return cls(
            settings.sandboxes,
            settings.memory_mb,
            settings.owner_sandboxes,
            settings.owner_memory_mb,
            capacity,
        )


@dataclass(frozen=True, slots=True)
class Quota:
    """What an account may have at once, instead of `limits.owner_…`; None: as in the settings."""

    sandboxes: int | None = None
    memory_mb: int | None = None
    runs: int | None = None


NO_QUOTA = Quota()


@dataclass(eq=False, slots=True)
class Ticket:
    """One machine's claim on the limits, from the request until the machine is torn down."""

    owner: str
    memory_mb: int  # that the machine may take from its host
    short_lived: bool = False  # its place is free again soon: it is for one run, or being closed
    quota: Quota = NO_QUOTA  # of the account that asked


@dataclass(frozen=True, slots=True)
class Blocker:
    """A limit that has no room for a group of tickets."""

    setting: str
    value: int
    per_owner: bool  # else it is a limit on all owners together
    never_fits: bool  # the group exceeds the whole limit
    may_grow: bool  # another host may join


Group = tuple[Ticket, ...]  # tickets of one owner that are admitted together or not at all


class FairQueue:
    """The tickets that hold a place, and a queue of waiting groups for each owner."""

    def __init__(self, limits: Limits) -> None:
        self.holders: list[Ticket] = []
        self.limits = limits
        self._queues: OrderedDict[str, deque[Group]] = OrderedDict()  # the first owner is served next

    @property
    def waiting(self) -> int:
        """The number of waiting tickets."""
        return sum(len(group) for queue in self._queues.values() for group in queue)

    def join(self, *group: Ticket) -> None:
        """Queue a group of tickets, which need their places at the same time."""
        self._queues.setdefault(group[0].owner, deque()).append(group)

    def leave(self, ticket: Ticket) -> None:
        """Give back a place; or, if the ticket still waits, remove its whole group from the queue."""
        if ticket in self.holders:
            self.holders.remove(ticket)
            return
        for group in self._queues.get(ticket.owner, ()):
            if ticket in group:
                self._dequeue(group)
                return

    def admit(self) -> list[Ticket]:
        """Give places to the tickets that are next, as far as there is room, and return them."""
        admitted: list[Ticket] = []
        while group := self._next():
            owner = group[0].owner
            self._dequeue(group)
            if owner in self._queues:
                self._queues.move_to_end(owner)
            self.holders += group
            admitted += group
        return admitted

    def blocker(self, *group: Ticket) -> Blocker | None:
        """Return the limit that blocks the group, its owner's limits first."""
        owned = [holder for holder in self.holders if holder.owner == group[0].owner]
        count, memory_mb = len(group), _memory(group)
        held, held_mb = len(self.holders), _memory(self.holders)
        limits, capacity, quota = self.limits, self.limits.capacity, group[0].quota
        return (
            _over(*owner_limit("sandboxes", quota.sandboxes, limits.owner_sandboxes), len(owned), count, per_owner=True)
            or _over(
                *owner_limit("memory_mb", quota.memory_mb, limits.owner_memory_mb),
                *(_memory(owned), memory_mb),
                per_owner=True,
            )
            or _over("limits.sandboxes", limits.sandboxes, held, count)
            or _over("limits.memory_mb", limits.memory_mb, held_mb, memory_mb)
            or _over("capacity.machines", capacity.machines, held, count, may_grow=True)
            or _over("capacity.memory_mb", capacity.memory_mb, held_mb, memory_mb, may_grow=True)
        )

    def first_blocker(self) -> Blocker | None:
        """Return the limit that the first blocked group waits for."""
        return next((blocker for queue in self._queues.values() if (blocker := self.blocker(*queue[0]))), None)

    def is_futile(self, *group: Ticket) -> bool:
        """Return whether waiting cannot help: only the owner could make room, and the owner is waiting."""
        blocker = self.blocker(*group)
        if blocker is None or blocker.may_grow:
            return False
        owner = group[0].owner
        blocking = [holder for holder in self.holders if holder.owner == owner or not blocker.per_owner]
        return blocker.never_fits or all(holder.owner == owner and not holder.short_lived for holder in blocking)

    def _next(self) -> Group | None:
        for queue in self._queues.values():
            blocker = self.blocker(*queue[0])
            if blocker is None:
                return queue[0]
            if not blocker.per_owner:
                return None  # smaller groups do not overtake, or a large one might wait forever
        return None

    def _dequeue(self, group: Group) -> None:
        owner = group[0].owner
        queue = self._queues[owner]
        queue.remove(group)
        if not queue:
            del self._queues[owner]


def owner_limit(what: str, quota: int | None, limit: int | None) -> tuple[str, int | None]:
    """Return the limit that holds for an owner, and its name: the account's quota, or else the setting."""
    return (f"limits.owner_{what}", limit) if quota is None else (f"quota.{what}", quota)


def _memory(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.memory_mb for ticket in tickets)


def _over(
    setting: str, limit: int | None, used: int, wanted: int, *, per_owner: bool = False, may_grow: bool = False
) -> Blocker | None:
    if limit is None or used + wanted <= limit:
        return None
    return Blocker(setting, limit, per_owner, never_fits=wanted > limit and not may_grow, may_grow=may_grow)


def _ignore(_setting: str) -> None:
    """Ignore the refusal."""


class Admission:
    """Lets callers wait in the queue."""

    def __init__(self, limits: Limits, timeout_s: float, on_refusal: Callable[[str], None] = _ignore) -> None:
        self.on_refusal = on_refusal  # called with the name of the setting
        self._queue = FairQueue(limits)
        self._timeout_s = timeout_s
        self._admitted: dict[Ticket, anyio.Event] = {}  # of the waiting tickets

    @property
    def holders(self) -> list[Ticket]:
        """The tickets that hold a place."""
        return list(self._queue.holders)

    @property
    def waiting(self) -> int:
        """The number of waiting tickets."""
        return self._queue.waiting

    def resize(self, limits: Limits) -> None:
        """Replace the limits, and admit waiting tickets if there is room now. Holders keep their places."""
        self._queue.limits = limits
        self._admit()

    @asynccontextmanager
    async def place(self, ticket: Ticket) -> AsyncIterator[None]:
        """Hold a place within all limits during the block.

        Raises:
            LimitReached: there was none in time, or waiting cannot help.
        """
        async with self.places(ticket):
            yield

    @asynccontextmanager
    async def places(self, *group: Ticket) -> AsyncIterator[list[AsyncExitStack]]:
        """Hold a place for each ticket, all of them or none. A caller keeps a place after the block with `pop_all`.

        Raises:
            LimitReached: there was no room for all in time, or waiting cannot help.
        """
        admitted = anyio.Event()
        self._admitted.update(dict.fromkeys(group, admitted))
        self._queue.join(*group)
        async with AsyncExitStack() as stack:
            held = [await stack.enter_async_context(AsyncExitStack()) for _ in group]
            for place, ticket in zip(held, group, strict=True):
                place.callback(self._leave, ticket)
            self._admit()
            if not admitted.is_set():
                await self._wait(group, admitted)
            yield held

    def _leave(self, ticket: Ticket) -> None:
        self._admitted.pop(ticket, None)
        self._queue.leave(ticket)
        self._admit()

    def _admit(self) -> None:
        for ticket in self._queue.admit():
            self._admitted.pop(ticket).set()

    async def _wait(self, group: Group, admitted: anyio.Event) -> None:
        if not self._queue.is_futile(*group):
            with anyio.move_on_after(self._timeout_s):
                await admitted.wait()
        if not admitted.is_set():
            raise self._refusal(group)

    def _refusal(self, group: Group) -> LimitReached:
        blocker = self._queue.blocker(*group) or self._queue.first_blocker()
        assert blocker is not None, "a ticket waits only for a limit"
        self.on_refusal(blocker.setting)
        if blocker.never_fits:
            return NeverFits(blocker.setting, blocker.value, len(group), group[0].memory_mb)
        if self._queue.is_futile(*group):
            return SandboxLimit(blocker.setting, blocker.value)
        return QueueTimeout(blocker.setting, blocker.value, self._timeout_s)
