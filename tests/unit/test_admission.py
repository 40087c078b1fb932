"""Admission: the decisions without a clock, then callers that wait for them."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.errors import LimitReached, SandboxLimit
from mcp_sandbox.machines.provider import Capacity
from mcp_sandbox.sandboxes.admission import Admission, FairQueue, Limits, Ticket


def joined(queue: FairQueue, *owners: str, memory_mb: int = 100) -> list[Ticket]:
    tickets = [Ticket(owner, memory_mb) for owner in owners]
    for ticket in tickets:
        queue.join(ticket)
    return tickets


def served(queue: FairQueue) -> list[Ticket]:
    """Return all waiting tickets in the order of admission, as places become free one by one."""
    order = queue.admit()
    while queue.holders:
        queue.leave(queue.holders[0])
        order += queue.admit()
    return order


def test_owners_take_turns_and_each_is_served_in_order():
    queue = FairQueue(Limits(sandboxes=1))
    a1, a2, a3, b1, b2, c1 = joined(queue, "a", "a", "a", "b", "b", "c")
    assert served(queue) == [a1, b1, c1, a2, b2, a3]


def test_a_later_owner_does_not_overtake():
    queue = FairQueue(Limits(sandboxes=1))
    first, second = joined(queue, "a", "b")
    assert queue.admit() == [first]
    (third,) = joined(queue, "c")
    queue.leave(first)
    assert queue.admit() == [second]
    queue.leave(third)  # stops waiting
    queue.leave(second)
    assert queue.admit() == []


def test_an_owner_at_the_owner_limit_does_not_block_others():
    queue = FairQueue(Limits(sandboxes=3, owner_sandboxes=1))
    a1, a2, b1 = joined(queue, "a", "a", "b")
    assert queue.admit() == [a1, b1]
    queue.leave(a1)
    assert queue.admit() == [a2]


def test_a_large_ticket_is_not_starved_by_small_ones():
    queue = FairQueue(Limits(sandboxes=9, memory_mb=300))
    (small,) = joined(queue, "a")
    assert queue.admit() == [small]
    (large,) = joined(queue, "b", memory_mb=300)
    joined(queue, "c")
    assert queue.admit() == []
    queue.leave(small)
    assert queue.admit() == [large]


def test_a_group_is_admitted_as_a_whole_or_waits_without_holding_places():
    queue = FairQueue(Limits(sandboxes=3))
    (single,) = joined(queue, "a")
    queue.admit()
    groups = [[Ticket(owner, 100) for _ in range(3)] for owner in "bc"]
    for group in groups:
        queue.join(*group)
    assert (queue.admit(), queue.waiting) == ([], 6)
    queue.leave(single)
    assert queue.admit() == groups[0]
    queue.leave(groups[1][0])  # removes the whole group
    assert (queue.waiting, queue.holders) == (0, groups[0])


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        (Limits(sandboxes=1), "limits.sandboxes"),
        (Limits(sandboxes=9, memory_mb=150), "limits.memory_mb"),
        (Limits(sandboxes=9, owner_sandboxes=1), "limits.owner_sandboxes"),
        (Limits(sandboxes=1, owner_memory_mb=150), "limits.owner_memory_mb"),
        (Limits(sandboxes=9, capacity=Capacity(machines=1)), "capacity.machines"),
        (Limits(sandboxes=9, capacity=Capacity(memory_mb=150)), "capacity.memory_mb"),
        (Limits(sandboxes=1, capacity=Capacity(machines=1)), "limits.sandboxes"),
    ],
)
def test_the_blocking_limit_is_known(limits: Limits, setting: str):
    queue = FairQueue(limits)
    joined(queue, "a")
    queue.admit()
    (waiting,) = joined(queue, "a")
    blocker = queue.blocker(waiting)
    assert blocker is not None
    assert blocker.setting == setting


def test_waiting_is_futile_if_only_the_owners_own_lasting_sandboxes_block():
    queue = FairQueue(Limits(sandboxes=2))
    mine, _ = joined(queue, "a", "a")
    queue.admit()
    (asking,) = joined(queue, "a")
    assert queue.is_futile(asking)
    mine.short_lived = True
    assert not queue.is_futile(asking)
    (other,) = joined(queue, "b")
    assert not queue.is_futile(other)


def test_waiting_is_futile_for_a_ticket_larger_than_the_limit():
    queue = FairQueue(Limits(sandboxes=2, memory_mb=300))
    (huge,) = joined(queue, "a", memory_mb=301)
    assert queue.is_futile(huge)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=30),
    st.integers(1, 4),
    st.integers(60, 120),
    st.integers(1, 3),
)
def test_no_limit_is_ever_exceeded_and_every_ticket_is_admitted_once(
    wanted: list[tuple[str, int]], sandboxes: int, memory_mb: int, owner_sandboxes: int
):
    queue = FairQueue(Limits(sandboxes, memory_mb, owner_sandboxes))
    tickets = [Ticket(owner, size) for owner, size in wanted]
    for ticket in tickets:
        queue.join(ticket)
    order = queue.admit()
    while queue.holders:
        assert len(queue.holders) <= sandboxes
        assert sum(holder.memory_mb for holder in queue.holders) <= memory_mb
        assert all(sum(h.owner == owner for h in queue.holders) <= owner_sandboxes for owner in "abc")
        queue.leave(queue.holders[0])
        order += queue.admit()
    assert sorted(map(id, order)) == sorted(map(id, tickets))
    for owner in "abc":
        assert [t for t in order if t.owner == owner] == [t for t in tickets if t.owner == owner]


async def test_a_returned_place_goes_to_the_next_in_the_queue():
    admission = Admission(Limits(sandboxes=1), timeout_s=20)
    got: list[str] = []

    async def wait(owner: str) -> None:
        async with admission.place(Ticket(owner, 100)):
            got.append(owner)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks, admission.place(Ticket("a", 100)):
            for owner in "bcb":
                tasks.start_soon(wait, owner)
                await anyio.wait_all_tasks_blocked()
            assert (got, admission.waiting) == ([], 3)
    assert got == ["b", "c", "b"]
    assert (admission.holders, admission.waiting) == ([], 0)


async def test_a_cancelled_wait_leaves_the_queue():
    admission = Admission(Limits(sandboxes=1), timeout_s=20)

    async def wait() -> None:
        async with admission.place(Ticket("b", 100)):
            pytest.fail("there was no place")

    async with admission.place(Ticket("a", 100)):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert admission.waiting == 1
            tasks.cancel_scope.cancel()
        assert (len(admission.holders), admission.waiting) == (1, 0)


async def test_waiting_times_out_and_the_error_names_the_limit():
    admission = Admission(Limits(sandboxes=1), timeout_s=0.01)
    async with admission.place(Ticket("a", 100)):
        with pytest.raises(LimitReached, match=r"limits\.sandboxes = 1 .*within 0.01 s"):
            async with admission.place(Ticket("b", 100)):
                pytest.fail("there was no place")
        assert (len(admission.holders), admission.waiting) == (1, 0)


async def test_a_place_that_was_taken_over_outlasts_its_group():
    admission = Admission(Limits(sandboxes=2), timeout_s=1)
    async with admission.places(Ticket("a", 100), Ticket("a", 100)) as (first, _):
        taken = first.pop_all()
    assert (len(admission.holders), admission.waiting) == (1, 0)
    with pytest.raises(LimitReached, match="never has room for 3"):
        async with admission.places(*(Ticket("b", 100) for _ in range(3))):
            pytest.fail("there was no place")
    await taken.aclose()
    assert (admission.holders, admission.waiting) == ([], 0)


async def test_an_owner_who_alone_can_make_room_is_refused_at_once():
    admission = Admission(Limits(sandboxes=9, owner_sandboxes=1, memory_mb=300), timeout_s=3600)
    with anyio.fail_after(5):
        async with admission.place(Ticket("a", 100)):
            with pytest.raises(SandboxLimit, match=r"limits\.owner_sandboxes = 1"):
                async with admission.place(Ticket("a", 100)):
                    pytest.fail("there was no place")
            with pytest.raises(LimitReached, match=r"limits\.memory_mb = 300 .*301 MB"):
                async with admission.place(Ticket("b", 301)):
                    pytest.fail("there was no place")


def test_waiting_helps_while_another_host_may_join():
    queue = FairQueue(Limits(sandboxes=9, capacity=Capacity(machines=0)))
    (asking,) = joined(queue, "a")
    assert not queue.is_futile(asking)


async def test_requests_that_wait_are_admitted_as_soon_as_there_is_more_room():
    admission = Admission(Limits(sandboxes=9, capacity=Capacity(machines=0)), timeout_s=3600)
    admitted: list[str] = []

    async def wait(owner: str) -> None:
        async with admission.place(Ticket(owner, 100)):
            admitted.append(owner)
            await anyio.sleep_forever()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for owner in "abc":
                tasks.start_soon(wait, owner)
                await anyio.wait_all_tasks_blocked()
            admission.resize(Limits(sandboxes=9, capacity=Capacity(machines=2)))
            await anyio.wait_all_tasks_blocked()
            assert (admitted, admission.waiting) == (["a", "b"], 1)
            tasks.cancel_scope.cancel()


async def test_less_room_takes_no_place_away_and_refuses_the_next_request():
    admission = Admission(Limits(sandboxes=9, capacity=Capacity(machines=2)), timeout_s=0.01)
    async with admission.place(Ticket("a", 100)), admission.place(Ticket("b", 100)):
        admission.resize(Limits(sandboxes=9, capacity=Capacity(machines=1)))
        assert len(admission.holders) == 2
        with pytest.raises(LimitReached, match=r"capacity\.machines = 1 .*within 0.01 s"):
            async with admission.place(Ticket("c", 100)):
                pytest.fail("there was no place")
