"""Decide which machines a pool starts and stops, from its state alone: no clock, no I/O.

Every template wants `min_ready` machines, or as many as the largest burst of requests within the last `idle_s` took.
The memory budget is dealt out slot by slot, most important first. The plan is the difference between the slots dealt
and the machines there are. Carrying it out never changes the deal, so the pool comes to rest.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from templates.model import PoolMode

BURST_S = 10.0  # requests this close together can come faster than a busy host replaces machines
HALF_LIFE_S = 300.0  # how fast past use loses weight
RENEW_AT = 0.9  # share of the maximum age at which the successor is started, so that it is ready in time


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a pool may hold."""

    min_ready: int  # per template
    max_ready: int  # per template; wins over `min_ready`
    max_starting: int  # at once, including those started for a request
    memory_mb: int  # of all pooled machines
    max_age_s: float
    idle_s: float  # a burst older than this is forgotten


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests for a template, summarised in at most `max_ready` numbers."""

    recent: tuple[float, ...] = ()  # times of the last requests, oldest first
    reached: tuple[float, ...] = ()  # [k]: when a burst (within BURST_S) last reached k + 1 requests
    weight: float = -math.inf  # past use on a log scale that moves with time, so comparing needs no ageing

    def after_request(self, now: float, most: int) -> "Demand":
        """Return the demand after one more request; a burst counts up to `most`."""
        recent = (*self.recent, now)[-most:] if most else ()
        burst = sum(time > now - BURST_S for time in recent)
        time = now / HALF_LIFE_S
        weight = time + math.log2(1 + 2 ** (self.weight - time))
        return Demand(recent, (now,) * burst + self.reached[burst:], weight)


@dataclass(frozen=True, slots=True)
class ReadyMachine:
    """A machine that waits for a request."""

    id: int
    since: float
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class TemplateState:
    """One template's part of the pool."""

    name: str
    memory_mb: int  # that one machine may take from the host
    mode: PoolMode = "pooled"
    ready: tuple[ReadyMachine, ...] = ()
    starting: int = 0
    stopping: int = 0  # they use memory until they have ended
    demand: Demand = Demand()
    retry_at: float | None = None  # the earliest time of the next start, after a failed one or at the server's start


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and when to plan again if nothing happens earlier."""

    start: tuple[str, ...] = ()  # the template of each machine, most urgent first
    stop: tuple[int, ...] = ()  # ids of machines
    next_look: float | None = None


class _View:
    """A template's machines, sorted by whether they can be leased."""

    def __init__(self, state: TemplateState, limits: PoolLimits, now: float) -> None:
        self.state = state
        wanted = max(limits.min_ready, sum(time + limits.idle_s > now for time in state.demand.reached))
        self.wanted = min(limits.max_ready, wanted) if state.mode == "pooled" else 0
        by_age = sorted(state.ready, key=lambda machine: (machine.since, machine.id))
        self.good = [m for m in by_age if m.healthy and m.since + limits.max_age_s > now]
        self.bad = [m for m in by_age if m not in self.good]
        fresh = sum(m.since + RENEW_AT * limits.max_age_s > now for m in self.good)
        self.lasting = fresh + state.starting
        self.filled = max(self.lasting, len(self.good))  # a machine and its successor fill one slot

    @property
    def memory_mb(self) -> int:
        return self.state.memory_mb * (len(self.state.ready) + self.state.starting + self.state.stopping)

    def importance(self, slot: int, limits: PoolLimits) -> tuple[int, float, str, int]:
        """Return the sort key of a slot: guaranteed slots first, then by use, templates that just failed last."""
        filled = slot < self.filled
        tier = 0 if slot < limits.min_ready else 1
        if not filled and self.state.retry_at is not None:
            tier = 2  # a template that cannot start must not take room from one that can
        # A filled slot weighs double, or two equally used templates would evict each other forever.
        weight = self.state.demand.weight + filled
        return tier, -weight, self.state.name, slot


def make_plan(states: Iterable[TemplateState], limits: PoolLimits, now: float, on_demand: int = 0) -> Plan:
    """Decide what to start and stop while `on_demand` machines are being started for requests."""
    views = [_View(state, limits, now) for state in states]
    slots = _deal(views, limits)
    dealt = Counter(view.state.name for view, _ in slots)
    stop: list[int] = []
    for view in views:
        surplus = max(0, len(view.good) - dealt[view.state.name])
        stop += [machine.id for machine in (*view.bad, *view.good[:surplus])]
    # Empty slots first: the successor of a machine that is still good can wait.
    missing = [view for view, slot in slots if slot >= view.filled]
    missing += [view for view, slot in slots if view.lasting <= slot < view.filled]
    resting = [view for view in missing if (view.state.retry_at or -math.inf) > now]
    start = _affordable([view for view in missing if view not in resting], views, limits, on_demand)
    return Plan(tuple(start), tuple(stop), _next_look(views, resting, limits, now))


def _deal(views: Sequence[_View], limits: PoolLimits) -> list[tuple[_View, int]]:
    """Return the slots, empty or filled, that fit into the memory budget, most important first."""
    wanted = [(view, slot) for view in views for slot in range(view.wanted)]
    wanted.sort(key=lambda pair: pair[0].importance(pair[1], limits))
    free_mb = limits.memory_mb
    dealt = []
    for view, slot in wanted:
        if view.state.memory_mb <= free_mb:
            free_mb -= view.state.memory_mb
            dealt.append((view, slot))
    return dealt


def _affordable(missing: list[_View], views: list[_View], limits: PoolLimits, on_demand: int) -> list[str]:
    """Return the templates to start now. Machines that are stopping still use memory; requests go first."""
    free_mb = limits.memory_mb - sum(view.memory_mb for view in views)
    free_starts = limits.max_starting - on_demand - sum(view.state.starting for view in views)
    start: list[str] = []
    for view in missing:
        if len(start) < free_starts and view.state.memory_mb <= free_mb:
            free_mb -= view.state.memory_mb
            start.append(view.state.name)
    return start


def _next_look(views: list[_View], resting: list[_View], limits: PoolLimits, now: float) -> float | None:
    """Return when time alone changes the plan: a burst expires, a machine gets old, a failed start may be retried."""
    times = [view.state.retry_at for view in resting if view.state.retry_at is not None]
    for view in views:
        times += [time + limits.idle_s for time in view.state.demand.reached[limits.min_ready :]]
        for machine in view.good:
            times += [machine.since + RENEW_AT * limits.max_age_s, machine.since + limits.max_age_s]
    return min((time for time in times if time > now), default=None)
