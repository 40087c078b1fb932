"""The decisions of a pool, without a clock and without machines."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sandbox.machines.pool_plan import BURST_S, Demand, Plan, PoolLimits, ReadyMachine, TemplateState, make_plan
from templates.model import PoolMode

NOW = 10_000.0
LIMITS = PoolLimits(min_ready=1, max_ready=4, max_starting=2, memory_mb=4096, max_age_s=1000, idle_s=600)


def asked(*times: float, most: int = LIMITS.max_ready) -> Demand:
    demand = Demand()
    for time in times:
        demand = demand.after_request(time, most)
    return demand


def machine(number: int, age: float = 0.0, *, healthy: bool = True) -> ReadyMachine:
    return ReadyMachine(number, NOW - age, healthy)


def template(name: str = "a", *ready: ReadyMachine, memory_mb: int = 512, **more: object) -> TemplateState:
    return replace(TemplateState(name, memory_mb, ready=ready), **more)  # type: ignore[arg-type]


def plan(*states: TemplateState, on_demand: int = 0, now: float = NOW, **limits: float) -> Plan:
    return make_plan(states, replace(LIMITS, **limits), now, on_demand)  # type: ignore[arg-type]


def carry_out(states: Sequence[TemplateState], plan: Plan) -> list[TemplateState]:
    """The state right after the plan was carried out: nothing has started or ended yet."""
    starts = Counter(plan.start)
    after = []
    for state in states:
        kept = tuple(machine for machine in state.ready if machine.id not in plan.stop)
        stopping = state.stopping + len(state.ready) - len(kept)
        after.append(replace(state, ready=kept, stopping=stopping, starting=state.starting + starts[state.name]))
    return after


def settle(states: Sequence[TemplateState], now: float) -> list[TemplateState]:
    """The state once all starts are ready and all stops have ended."""
    new_ids = iter(range(10**6 + max((m.id for s in states for m in s.ready), default=0), 10**9))
    return [
        replace(
            s, ready=(*s.ready, *(ReadyMachine(next(new_ids), now) for _ in range(s.starting))), starting=0, stopping=0
        )
        for s in states
    ]


# -- size --------------------------------------------------------------------------------------------------


def test_the_minimum_is_started():
    assert plan(template()).start == ("a",)
    assert plan(template(), min_ready=2).start == ("a", "a")


def test_ready_machines_are_left_alone():
    assert plan(template("a", machine(1))) == Plan(next_look=NOW + 900)


def test_a_starting_machine_counts():
    assert plan(template(starting=1)) == Plan()


def test_machines_of_a_cold_template_are_stopped():
    state = template("a", machine(1), mode="cold", demand=asked(NOW, NOW, NOW))
    assert plan(state) == Plan(stop=(1,), next_look=plan(state).next_look)


def test_the_pool_grows_after_a_burst():
    burst = asked(NOW - 2, NOW - 1, NOW)
    assert plan(template("a", machine(1), demand=burst)).start == ("a", "a")


def test_requests_far_apart_need_only_one_machine():
    assert plan(template("a", machine(1), demand=asked(NOW - 3 * BURST_S, NOW - 2 * BURST_S, NOW))).start == ()


def test_growth_ends_at_the_maximum():
    burst = asked(*[NOW] * 20)
    assert plan(template(demand=burst), max_starting=50).start == ("a",) * 4
    assert len(burst.recent) == 4


def test_the_maximum_wins_over_the_minimum():
    assert plan(template("a", machine(1)), max_ready=0).stop == (1,)


def test_a_burst_expires_and_the_plan_says_when():
    state = template("a", *map(machine, (1, 2, 3)), demand=asked(NOW - 100, NOW - 99, NOW - 98, NOW))
    before = plan(state)
    assert (before.start, before.stop, before.next_look) == ((), (), NOW - 98 + 600)
    after = plan(state, now=NOW - 98 + 600)
    assert (after.start, after.stop) == ((), (1, 2))


def test_the_oldest_machines_are_stopped_first():
    assert plan(template("a", machine(1, 5), machine(2, 50), machine(3, 20))).stop == (2, 3)


# -- starts at once ----------------------------------------------------------------------------------------


def test_only_a_few_machines_start_at_once():
    assert plan(template(), min_ready=4).start == ("a", "a")
    assert plan(template(starting=1), min_ready=4).start == ("a",)
    assert plan(template(starting=2), min_ready=4).start == ()


def test_requests_go_before_refills():
    assert plan(template(), min_ready=4, on_demand=1).start == ("a",)
    assert plan(template(), min_ready=4, on_demand=16).start == ()


def test_every_template_gets_its_first_machine_before_one_gets_its_second():
    busy = template("busy", demand=asked(NOW, NOW, NOW))
    assert plan(busy, template("calm"), max_starting=3).start == ("busy", "calm", "busy")


# -- memory ------------------------------------------------------------------------------------------------


def test_starting_and_stopping_machines_count_against_the_memory_budget():
    assert plan(template("a", machine(1), starting=1, stopping=1), min_ready=4, memory_mb=2047).start == ()
    assert plan(template("a", machine(1), starting=1, stopping=1), min_ready=4, memory_mb=2048).start == ("a",)


def test_the_least_used_template_gives_way():
    often, seldom = asked(NOW - 30, NOW - 20, NOW - 10), asked(NOW - 5)
    rivals = template("a", machine(1), demand=seldom), template("b", demand=often)
    assert plan(*rivals, memory_mb=512).stop == (1,)
    assert plan(*carry_out(rivals, plan(*rivals, memory_mb=512)), memory_mb=512).start == ()  # until it has ended
    ended = settle(carry_out(rivals, plan(*rivals, memory_mb=512)), NOW)
    assert plan(*ended, memory_mb=512).start == ("b",)


def test_two_equally_used_templates_do_not_evict_each_other():
    first, second = asked(NOW - 40, NOW - 20), asked(NOW - 30, NOW - 10)
    assert plan(template("a", machine(1), demand=first), template("b", demand=second), memory_mb=512).stop == ()
    assert plan(template("a", demand=first), template("b", machine(1), demand=second), memory_mb=512).stop == ()


def test_growth_takes_only_memory_that_no_minimum_needs():
    busy = template("busy", machine(1), demand=asked(*[NOW] * 4))
    both = busy, template("calm", machine(2))
    assert plan(*both, memory_mb=1024) == Plan(next_look=plan(*both).next_look)
    assert plan(*both, memory_mb=1536).start == ("busy",)


def test_a_template_too_large_for_the_budget_does_not_block_others():
    assert plan(template("a", memory_mb=8192), template("b")).start == ("b",)


# -- machines that are old or unhealthy ---------------------------------------------------------------------


def test_the_successor_of_an_old_machine_is_started_first():
    old = template("a", machine(1, 950))
    assert (plan(old).start, plan(old).stop) == (("a",), ())
    assert plan(*carry_out([old], plan(old))).stop == ()
    assert plan(*settle(carry_out([old], plan(old)), NOW)).stop == (1,)


def test_an_old_machine_without_room_for_a_successor_stays_until_it_is_too_old():
    old = template("a", machine(1, 950))
    assert plan(old, memory_mb=512) == Plan(next_look=NOW + 50)
    assert plan(old, memory_mb=512, now=NOW + 50).stop == (1,)


def test_an_unhealthy_or_too_old_machine_is_stopped_at_once_and_replaced():
    for bad in (machine(1, healthy=False), machine(1, 1000)):
        assert (plan(template("a", bad)).start, plan(template("a", bad)).stop) == (("a",), (1,))


def test_empty_slots_are_filled_before_successors_start():
    assert plan(template("a", machine(1, 950)), template("b"), max_starting=1).start == ("b",)


def test_a_template_waits_after_a_failed_start():
    state = template(retry_at=NOW + 5)
    assert plan(state) == Plan(next_look=NOW + 5)
    assert plan(state, now=NOW + 5).start == ("a",)


def test_a_template_that_cannot_start_takes_no_room_from_one_that_can():
    busy = template("busy", machine(1), demand=asked(*[NOW] * 2))
    assert plan(busy, template("broken", retry_at=NOW - 1), memory_mb=1024).start == ("busy",)


# -- properties --------------------------------------------------------------------------------------------

MODES: list[PoolMode] = ["pooled", "pooled", "cold"]
AGES = st.integers(0, 1200).map(float)


@st.composite
def some_states(draw: st.DrawFn) -> list[TemplateState]:
    ids = iter(range(1000))
    states = []
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4)):
        ages = draw(st.lists(st.tuples(AGES, st.booleans()), max_size=5))
        states.append(
            TemplateState(
                name,
                memory_mb=draw(st.sampled_from([128, 512, 1024])),
                mode=draw(st.sampled_from(MODES)),
                ready=tuple(ReadyMachine(next(ids), NOW - age, healthy) for age, healthy in ages),
                starting=draw(st.integers(0, 3)),
                stopping=draw(st.integers(0, 3)),
                demand=asked(*sorted(NOW - age for age in draw(st.lists(AGES, max_size=12)))),
                retry_at=draw(st.none() | st.integers(-50, 50).map(lambda s: NOW + s)),
            )
        )
    return states


some_limits = st.builds(
    PoolLimits,
    min_ready=st.integers(0, 3),
    max_ready=st.integers(0, 4),
    max_starting=st.integers(1, 4),
    memory_mb=st.integers(0, 4096),
    max_age_s=st.sampled_from([100.0, 1000.0]),
    idle_s=st.sampled_from([60.0, 600.0]),
)


def memory_of(states: Sequence[TemplateState]) -> int:
    return sum(s.memory_mb * (len(s.ready) + s.starting + s.stopping) for s in states)


@settings(deadline=None)
@given(some_states(), some_limits, st.integers(0, 5))
def test_starts_never_exceed_the_memory_budget_or_the_number_at_once(
    states: list[TemplateState], limits: PoolLimits, on_demand: int
):
    made = make_plan(states, limits, NOW, on_demand)
    if made.start:
        after = carry_out(states, made)
        assert memory_of(after) <= limits.memory_mb
        assert sum(state.starting for state in after) + on_demand <= limits.max_starting


@settings(deadline=None)
@given(some_states(), some_limits)
def test_planning_again_after_a_plan_changes_nothing(states: list[TemplateState], limits: PoolLimits):
    made = make_plan(states, limits, NOW)
    again = make_plan(carry_out(states, made), limits, NOW)
    assert (again.start, again.stop) == ((), ())


@settings(deadline=None)
@given(some_states(), some_limits)
def test_the_minimum_is_kept_unless_memory_age_or_health_forbids_it(states: list[TemplateState], limits: PoolLimits):
    minimum = min(limits.min_ready, limits.max_ready)
    pooled = [state for state in states if state.mode == "pooled"]
    limits = replace(limits, memory_mb=max(limits.memory_mb, sum(state.memory_mb * minimum for state in pooled)))
    made = make_plan(states, limits, NOW)
    for state in pooled:
        good = [m for m in state.ready if m.healthy and m.since + limits.max_age_s > NOW]
        kept = [m for m in good if m.id not in made.stop]
        assert len(kept) >= min(minimum, len(good))


@settings(deadline=None)
@given(some_states(), some_limits)
def test_no_unhealthy_or_too_old_machine_is_kept(states: list[TemplateState], limits: PoolLimits):
    made = make_plan(states, limits, NOW)
    kept = [m for state in states for m in state.ready if m.id not in made.stop]
    assert all(m.healthy and m.since + limits.max_age_s > NOW for m in kept)


@settings(deadline=None)
@given(some_states(), some_limits)
def test_the_order_of_the_templates_does_not_matter(states: list[TemplateState], limits: PoolLimits):
    one, other = make_plan(states, limits, NOW), make_plan(states[::-1], limits, NOW)
    assert (one.start, set(one.stop), one.next_look) == (other.start, set(other.stop), other.next_look)


@settings(deadline=None)
@given(some_states(), some_limits, st.floats(0, 1, exclude_max=True))
def test_the_pool_comes_to_rest_until_the_next_look(states: list[TemplateState], limits: PoolLimits, part: float):
    states = settle(states, NOW)
    for _ in range(40):
        made = make_plan(states, limits, NOW)
        if not made.start and not made.stop:
            break
        states = settle(carry_out(states, made), NOW)
    else:
        pytest.fail("there was always something to do")
    assert memory_of(states) <= limits.memory_mb
    assert made.next_look is None or made.next_look > NOW
    until = NOW + 10**6 if made.next_look is None else made.next_look
    later = make_plan(states, limits, min(NOW + part * (until - NOW), math.nextafter(until, 0)))
    assert (later.start, later.stop) == ((), ())
