"""Messages kept for clients that lose their connection."""

import anyio
import pytest
from mcp.server.streamable_http import EventMessage
from mcp_types import JSONRPCMessage, JSONRPCNotification, JSONRPCResponse

from mcp_sandbox.serving.replay import Room, SessionEvents
from tests.waiting import HANG_S


def note(words: str = "") -> JSONRPCMessage:
    return JSONRPCNotification(jsonrpc="2.0", method="note", params={"words": words})


ANSWER = JSONRPCResponse(jsonrpc="2.0", id=1, result={})


async def replayed(events: SessionEvents, after: str) -> list[EventMessage]:
    sent: list[EventMessage] = []

    async def keep(message: EventMessage) -> None:
        await anyio.lowlevel.checkpoint()
        sent.append(message)

    with anyio.fail_after(HANG_S):
        await events.replay_events_after(after, keep)
    return sent


async def test_a_stream_goes_on_after_the_last_event_a_client_has():
    events = SessionEvents(Room())
    await events.store_event("1", None)
    seen = await events.store_event("1", note("seen"))
    missed = await events.store_event("1", note("missed"))
    await events.store_event("2", note("of another request"))
    end = await events.store_event("1", ANSWER)
    assert await replayed(events, seen) == [EventMessage(note("missed"), missed), EventMessage(ANSWER, end)]


async def test_a_message_that_comes_during_a_replay_is_sent_too():
    events = SessionEvents(Room())
    start = await events.store_event("1", None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(events.store_event, "1", note())
        tasks.start_soon(events.store_event, "1", ANSWER)
        assert [event.message for event in await replayed(events, start)] == [note(), ANSWER]


async def test_an_answered_request_has_nothing_more_to_send():
    events = SessionEvents(Room())
    end = await events.store_event("1", ANSWER)
    assert await replayed(events, end) == []


async def test_the_end_of_a_session_ends_its_replays():
    events = SessionEvents(Room())
    start = await events.store_event("1", None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replayed, events, start)
        await anyio.wait_all_tasks_blocked()
        events.close()


async def test_a_session_keeps_its_latest_events_only():
    events = SessionEvents(Room(), max_events=2)
    ids = [await events.store_event("1", note()) for _ in range(3)]
    assert [events.knows(event_id) for event_id in ids] == [False, True, True]


@pytest.mark.parametrize("limit", ["session", "all sessions"])
async def test_long_messages_push_older_ones_out(limit: str):
    room = Room(5000 if limit == "all sessions" else 1 << 30)
    events = SessionEvents(room, max_bytes=5000 if limit == "session" else 1 << 30)
    first = await events.store_event("1", note("x" * 3000))
    second = await events.store_event("1", note("x" * 3000))
    assert (events.knows(first), events.knows(second)) == (False, True)


async def test_a_session_that_ends_makes_room():
    room = Room()
    free = room.free
    events = SessionEvents(room)
    await events.store_event("1", note("x" * 3000))
    assert room.free < free - 3000
    events.close()
    assert room.free == free
