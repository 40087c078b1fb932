"""Idempotency keys: what is kept, for whom, and how much of it."""

from collections.abc import AsyncIterator

import anyio
import pytest
from starlette.responses import Response

from mcp_sandbox.rest.errors import TooManyKeys
from mcp_sandbox.rest.idempotency import MAX_ACTIVE, Keys
from tests.waiting import HANG_S

KEPT = 20_000


class Worker:
    """Counts how often its work is done."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.done = 0

    async def __call__(self) -> Response:
        self.done += 1
        return Response(b"x" * self.size)


async def forever() -> Response:
    await anyio.sleep_forever()
    raise AssertionError


@pytest.fixture
async def keys() -> AsyncIterator[Keys]:
    with anyio.fail_after(HANG_S):
        async with Keys(max_bytes=KEPT) as keys:
            yield keys


async def test_answers_make_room_for_newer_ones_of_the_same_owner(keys: Keys):
    worker, other = Worker(8000), Worker(4000)
    await keys.answer("bob", "k", b"", other)
    for number in range(5):
        await keys.answer("ana", f"k{number}", b"", worker)
    await keys.answer("ana", "k4", b"", worker)
    assert worker.done == 5
    await keys.answer("ana", "k0", b"", worker)  # it was forgotten, so the request counts as new
    assert worker.done == 6
    await keys.answer("bob", "k", b"", other)
    assert other.done == 1


async def test_an_answer_larger_than_all_room_is_given_but_not_kept(keys: Keys):
    worker = Worker(2 * KEPT)
    assert len((await keys.answer("ana", "k", b"", worker)).body) == 2 * KEPT
    await keys.answer("ana", "k", b"", worker)
    assert worker.done == 2


async def test_an_owner_cannot_have_any_number_of_requests_carried_out(keys: Keys):
    async with anyio.create_task_group() as tasks:
        for number in range(MAX_ACTIVE):
            tasks.start_soon(keys.answer, "ana", str(number), b"", forever)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(TooManyKeys):
            await keys.answer("ana", "one more", b"", Worker())
        assert (await keys.answer("bob", "k", b"", Worker())).status_code == 200
        tasks.cancel_scope.cancel()


async def test_two_requests_at_once_with_one_key_are_one(keys: Keys):
    go, worker = anyio.Event(), Worker()

    async def work() -> Response:
        await go.wait()
        return await worker()

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(keys.answer, "ana", "k", b"", work)
        await anyio.wait_all_tasks_blocked()
        go.set()
    assert worker.done == 1


async def test_a_server_that_stops_answers_those_who_wait():
    answers: list[Response] = []

    async with anyio.create_task_group() as tasks, Keys() as keys:

        async def ask() -> None:
            answers.append(await keys.answer("ana", "k", b"", forever))

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
    assert [answer.status_code for answer in answers] == [503]


async def test_the_totals_are_those_of_what_is_kept(keys: Keys):
    for key, status in (("a", 200), ("b", 503), ("c", 404)):

        async def work(status: int = status) -> Response:
            return Response(b"x" * 100, status)

        await keys.answer("ana", key, b"", work)
    own = keys._owners["ana"]
    assert (set(own.entries), own.active) == ({"a", "c"}, 0)
    assert keys._size == own.size == sum(entry.size for entry in own.entries.values())
