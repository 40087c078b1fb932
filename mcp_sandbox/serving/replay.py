"""Sessions of 2025-11-25 over HTTP that survive a lost connection: a client that comes back reads on where it was.

A request of that era goes on without its client. The messages for it are kept, and a client that names the last one it
has (`Last-Event-ID`) gets those after it, and the answer when it comes. In 2026-07-28 there are no sessions: a client
that closes the stream of a request cancels it.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http import (
    LAST_EVENT_ID_HEADER,
    MCP_SESSION_ID_HEADER,
    EventCallback,
    EventMessage,
    EventStore,
    StreamableHTTPServerTransport,
)
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST, ErrorData, JSONRPCError, JSONRPCMessage, JSONRPCResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mcp_sandbox.serving.messages import InvalidMessage, checked_body

SESSION_IDLE_S = 30 * 60  # after this time without requests a session ends, and its messages go
SESSION_EVENTS = 1000  # a run reports its progress about once a second, and runs take minutes
SESSION_BYTES = 64 << 20  # room for the largest answer, twice
ALL_BYTES = 256 << 20
OWNER_SESSIONS = 100
RETRY_MS = 500  # after which a client whose stream broke should come back


@dataclass(slots=True)
class Room:
    """How many bytes all sessions may still keep, and who has taken some."""

    free: int = ALL_BYTES
    sessions: set["SessionEvents"] = field(default_factory=set)

    def make(self) -> None:
        """Drop messages until the others fit: the oldest ones of the session that keeps the most."""
        while self.free < 0 and self.sessions:
            max(self.sessions, key=lambda session: session.kept_bytes).drop_oldest()


@dataclass(frozen=True, slots=True)
class _Event:
    number: int
    stream: str
    message: JSONRPCMessage | None  # None: only a place in the stream to come back to
    size: int

    def lost(self) -> "_Event":
        """Return what is left of an answer that is not kept: its client must not wait for it."""
        assert isinstance(self.message, JSONRPCResponse | JSONRPCError)
        error = ErrorData(code=INTERNAL_ERROR, message="The answer is not kept any more: there was no room for it.")
        return replace(self, message=JSONRPCError(jsonrpc="2.0", id=self.message.id, error=error), size=0)

    @property
    def ends_stream(self) -> bool:
        return isinstance(self.message, JSONRPCResponse | JSONRPCError)


class SessionEvents(EventStore):
    """The latest messages of one session.

    The SDK would share one store among all sessions, and calls a stream by the id of its request. Clients count
    those from 1, so a client could read the messages of another. Hence one store for each session.
    """

    def __init__(self, room: Room, max_events: int = SESSION_EVENTS, max_bytes: int = SESSION_BYTES) -> None:
        self._room = room
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._events: deque[_Event] = deque()
        self._lost_answers: deque[_Event] = deque(maxlen=max_events)
        self.kept_bytes = 0
        self._last_number = 0
        self._closed = False
        self._changed = anyio.Event()

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Keep a message, at the expense of the session's oldest ones."""
        self._last_number += 1
        size = 0 if message is None else len(message.model_dump_json(by_alias=True, exclude_unset=True))
        self._events.append(_Event(self._last_number, stream_id, message, size))
        self.kept_bytes += size
        self._room.free -= size
        self._room.sessions.add(self)
        while len(self._events) > 1 and self._too_many():
            self.drop_oldest()
        self._room.make()
        self._wake()
        return str(self._last_number)

    def knows(self, event_id: str) -> bool:
        """Return whether a client that has this event can read on from there."""
        return self._find(event_id) is not None

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> None:
        """Send what came after an event in its stream, and what is still to come, until the request is answered.

        The SDK would continue with the stream of the live connection, and lose a message that comes in between.
        """
        last = self._find(last_event_id)
        while last is not None and not last.ends_stream:
            changed = self._changed
            for event in [
                event
                for event in (*self._lost_answers, *self._events)
                if event.stream == last.stream and event.number > last.number
            ]:
                last = event
                if event.message is not None:
                    await send_callback(EventMessage(event.message, str(event.number)))
            if not last.ends_stream:
                if self._closed:
                    return
                await changed.wait()

    def close(self) -> None:
        """Drop everything: the session has ended."""
        while self._events:
            self.drop_oldest()
        self._room.sessions.discard(self)
        self._closed = True
        self._wake()

    def drop_oldest(self) -> None:
        """Drop the oldest message. A client that waits for it is told."""
        dropped = self._events.popleft()
        self.kept_bytes -= dropped.size
        self._room.free += dropped.size
        if dropped.ends_stream:
            self._lost_answers.append(dropped.lost())
            self._wake()

    def _too_many(self) -> bool:
        return len(self._events) > self._max_events or self.kept_bytes > self._max_bytes

    def _find(self, event_id: str) -> _Event | None:
        return next((event for event in self._events if str(event.number) == event_id), None)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class ResumableSessions(StreamableHTTPSessionManager):
    """The SDK's sessions, each with its own store of messages."""

    def __init__(self, app: Server[Any], max_message_bytes: int) -> None:
        super().__init__(
            app,
            retry_interval=RETRY_MS,
            session_idle_timeout=SESSION_IDLE_S,
            max_request_body_size=max_message_bytes,
        )
        self._room = Room()
        self._events: dict[str, SessionEvents] = {}

    async def handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse to resume a stream whose messages are gone: the client would wait for ever."""
        request = Request(scope)
        events = self._events.get(request.headers.get(MCP_SESSION_ID_HEADER, ""))
        last = request.headers.get(LAST_EVENT_ID_HEADER)
        if request.method == "GET" and events is not None and last is not None and not events.knows(last):
            await _cannot_resume()(scope, receive, send)
            return
        await super().handle_request(scope, receive, send)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose size is checked. What is no message gets the errors that it gets on stdio."""
        if scope["method"] == "POST":
            try:
                receive = _once(checked_body(await Request(scope, receive).body()), receive)
            except InvalidMessage as invalid:
                await Response(invalid.answer, 400, media_type="application/json")(scope, receive, send)
                return
            except ClientDisconnect:
                return
        await super()._handle_request(scope, receive, send)

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        # Without tokens everybody is the same requestor, and a user of this host.
        if requestor is not None and list(self._session_owners.values()).count(requestor) >= OWNER_SESSIONS:
            return None
        transport = super()._admit_session(requestor)
        if transport is not None and transport.mcp_session_id is not None:
            events = self._events[transport.mcp_session_id] = SessionEvents(self._room)
            transport._event_store = events  # noqa: SLF001 - the SDK takes one store for all sessions only
        return transport

    async def _discard_session(self, session_id: str, transport: StreamableHTTPServerTransport) -> None:
        events = self._events.pop(session_id, None)
        if events is not None:
            events.close()
        await super()._discard_session(session_id, transport)


def _once(body: bytes, receive: Receive) -> Receive:
    """Return what receives a body that was read already, and then the end of the connection."""
    bodies = [body]

    async def receive_again() -> Message:
        return {"type": "http.request", "body": bodies.pop()} if bodies else await receive()

    return receive_again


def _cannot_resume() -> Response:
    error = ErrorData(code=INVALID_REQUEST, message="The messages after that event are not kept any more.")
    body = JSONRPCError(jsonrpc="2.0", id=None, error=error).model_dump_json(by_alias=True, exclude_unset=True)
    return Response(body, 400, media_type="application/json")
