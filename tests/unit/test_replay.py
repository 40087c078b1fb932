"""Messages kept for clients that lose their connection."""

import anyio
import pytest
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, authorization_context
from mcp.server.auth.provider import AccessToken
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http import EventMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCResponse

from mcp_sandbox.serving import replay
from mcp_sandbox.serving.replay import ResumableSessions, Room, SessionEvents
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


async def test_room_is_taken_from_the_session_that_keeps_the_most():
    room = Room(5000)
    heavy, light = SessionEvents(room), SessionEvents(room)
    old = await heavy.store_event("1", note("x" * 4000))
    kept = await light.store_event("1", note("x" * 3000))
    assert (heavy.knows(old), light.knows(kept)) == (False, True)


async def test_a_client_that_waits_for_an_answer_without_room_gets_an_error():
    events = SessionEvents(Room(100))
    start = await events.store_event("1", None)
    received: list[EventMessage] = []

    async def wait() -> None:
        received.extend(await replayed(events, start))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await events.store_event("1", JSONRPCResponse(jsonrpc="2.0", id=7, result={"text": "x" * 3000}))
    [event] = received
    assert isinstance(event.message, JSONRPCError)
    assert event.message.id == 7


async def test_a_message_longer_than_a_session_may_keep_is_kept_alone():
    events = SessionEvents(Room(), max_bytes=10)
    older = await events.store_event("1", note())
    long = await events.store_event("1", note("x" * 3000))
    assert (events.knows(older), events.knows(long)) == (False, True)


def test_an_owner_has_a_bounded_number_of_sessions(monkeypatch):
    monkeypatch.setattr(replay, "OWNER_SESSIONS", 2)
    sessions = ResumableSessions(Server("test"), 1000)
    ana, bob = (
        authorization_context(AuthenticatedUser(AccessToken(token="", client_id=name, scopes=[])))
        for name in ("ana", "bob")
    )
    assert [sessions._admit_session(owner) is not None for owner in (ana, ana, ana, bob)] == [True, True, False, True]
