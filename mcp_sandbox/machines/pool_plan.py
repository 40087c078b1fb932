"""Which machines a pool starts and stops: decided from what is there, without a clock and without a machine.

Every template wants `min_ready` machines, and as many as were asked for in one burst during the last `idle_s`. The
memory budget is dealt out slot by slot, the most important ones first; a template has what it was dealt, and the
difference to what is there are the actions. Carrying them out never changes the deal, so the pool comes to rest.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from templates.model import PoolMode

BURST_S = 10.0  # requests this close together come faster than taken machines are replaced on a busy host
HALF_LIFE_S = 300.0  # how fast past use loses weight against present use
RENEW_AT = 0.9  # of the greatest age: time enough to have the successor ready before a machine is too old


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a pool may hold."""

    min_ready: int  # of each template
    max_ready: int  # of each template; wins over `min_ready`
    max_starting: int  # at once, those included that somebody waits for
    memory_mb: int  # of all machines the pool has
    max_age_s: float
    idle_s: float  # a burst longer ago than this is forgotten


@dataclass(frozen=True, slots=True)
class Demand:
    """How a template was asked for, in as many numbers as it may have machines, however often it was asked for."""

    recent: tuple[float, ...] = ()  # the last requests, oldest first
    reached: tuple[float, ...] = ()  # [k]: when k + 1 machines were last asked for within BURST_S
    weight: float = -math.inf  # past use on a logarithmic scale that moves with time: it need not be aged to compare

    def after_request(self, now: float, most: int) -> "Demand":
        """The demand once somebody asked; bursts of more than `most` are not told apart."""
        recent = (*self.recent, now)[-most:] if most else ()
        burst = sum(time > now - BURST_S for time in recent)
        time = now / HALF_LIFE_S
        weight = time + math.log2(1 + 2 ** (self.weight - time))
        return Demand(recent, (now,) * burst + self.reached[burst:], weight)


@dataclass(frozen=True, slots=True)
class ReadyMachine:
    """A machine that waits for somebody to ask for it."""

    id: int
    since: float
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class TemplateState:
    """What the pool has of one template."""

    name: str
    memory_mb: int  # of one machine
    mode: PoolMode = "pooled"
    ready: tuple[ReadyMachine, ...] = ()
    starting: int = 0
    stopping: int = 0  # they take memory until they have ended
    demand: Demand = Demand()
    retry_at: float | None = None  # the last start failed, and no other one is tried sooner


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and when to ask again if nothing happens before."""

    start: tuple[str, ...] = ()  # a template for each machine, the most urgent first
    stop: tuple[int, ...] = ()
    next_look: float | None = None


class _View:
    """A template's machines, sorted by what they are good for."""

    def __init__(self, state: TemplateState, limits: PoolLimits, now: float) -> None:
        self.state = state
        wanted = max(limits.min_ready, sum(time + limits.idle_s > now for time in state.demand.reached))
        # A singleton is kept by whoever shares it out: a spare one would be a second.
        self.wanted = min(limits.max_ready, wanted) if state.mode == "pooled" else 0
        by_age = sorted(state.ready, key=lambda machine: (machine.since, machine.id))
        self.good = [m for m in by_age if m.healthy and m.since + limits.max_age_s > now]
        self.bad = [m for m in by_age if m not in self.good]
        fresh = sum(m.since + RENEW_AT * limits.max_age_s > now for m in self.good)
        self.lasting = fresh + state.starting
        self.held = max(self.lasting, len(self.good))  # a machine and its successor are one slot

    @property
    def memory_mb(self) -> int:
        return self.state.memory_mb * (len(self.state.ready) + self.state.starting + self.state.stopping)

    def importance(self, slot: int, limits: PoolLimits) -> tuple[int, float, str, int]:
        """Sorts the slots of all templates: the promised ones first, then by use, and last what just failed."""
        filled = slot < self.held
        tier = 0 if slot < limits.min_ready else 1
        if not filled and self.state.retry_at is not None:
            tier = 2  # a template that cannot start must not take room from those that can
        # What is filled weighs double: two templates used alike would else throw each other out again and again.
        weight = self.state.demand.weight + filled
        return tier, -weight, self.state.name, slot


def make_plan(states: Iterable[TemplateState], limits: PoolLimits, now: float, on_demand: int = 0) -> Plan:
    """What to start and stop; `on_demand` machines are being started for somebody who waits."""
    views = [_View(state, limits, now) for state in states]
    slots = _deal(views, limits)
    dealt = Counter(view.state.name for view, _ in slots)
    stop: list[int] = []
    for view in views:
        surplus = max(0, len(view.good) - dealt[view.state.name])
        stop += [machine.id for machine in (*view.bad, *view.good[:surplus])]
    # Empty slots first; successors of machines that are still good can wait.
    missing = [view for view, slot in slots if slot >= view.held]
    missing += [view for view, slot in slots if view.lasting <= slot < view.held]
    resting = [view for view in missing if (view.state.retry_at or -math.inf) > now]
    start = _affordable([view for view in missing if view not in resting], views, limits, on_demand)
    return Plan(tuple(start), tuple(stop), _next_look(views, resting, limits, now))


def _deal(views: Sequence[_View], limits: PoolLimits) -> list[tuple[_View, int]]:
    """The slots that fit into the budget, the most important first. They may be empty or filled."""
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
    """Those that may start now: machines on their way out still take memory, and people who wait go first."""
    free_mb = limits.memory_mb - sum(view.memory_mb for view in views)
    free_starts = limits.max_starting - on_demand - sum(view.state.starting for view in views)
    start: list[str] = []
    for view in missing:
        if len(start) < free_starts and view.state.memory_mb <= free_mb:
            free_mb -= view.state.memory_mb
            start.append(view.state.name)
    return start


def _next_look(views: list[_View], resting: list[_View], limits: PoolLimits, now: float) -> float | None:
    """When time alone changes the plan: a burst is forgotten, a machine gets old, a failed start may be tried again."""
    times = [view.state.retry_at for view in resting if view.state.retry_at is not None]
    for view in views:
        times += [time + limits.idle_s for time in view.state.demand.reached[limits.min_ready :]]
        for machine in view.good:
            times += [machine.since + RENEW_AT * limits.max_age_s, machine.since + limits.max_age_s]
    return min((time for time in times if time > now), default=None)
