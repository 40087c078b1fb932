"""Between a client on stdin and stdout and a shared server: each line is a request, each answer a line.

Every open request has a thread: a client has few of them, and threads need no event loop, which takes long to import.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from types import FrameType
from typing import Any

from mcp_sandbox.connect.link import BadAddress, Link, events_in
from mcp_sandbox.connect.messages import (
    INVALID_REQUEST,
    SERVER_ERROR,
    Message,
    NoMessage,
    answers,
    error_message,
    parse,
    refusal,
)

EXIT_USAGE = 2
LAST_ANSWERS_S = 0.5  # after the end of stdin, for answers on their way
RETRY_S = 0.5  # before a lost stream is resumed
RETRIES = 20  # in a row, without an event in between: a server restarts within seconds
NO_SESSION = 404
LOST = (OSError, HTTPException)
INITIALIZED = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'


def run(url: str, token: str | None) -> int:
    """Connect stdin and stdout to the server at `url` until stdin ends; return the exit code."""
    try:
        link = Link(url, token)
    except BadAddress as error:
        _complain(str(error))
        return EXIT_USAGE
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    relay = Relay(link, sys.stdout.fileno())
    try:
        relay.run(sys.stdin.buffer)
    finally:
        relay.end_session()
    return 0


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


class Relay:
    """The client's side of a shared server."""

    def __init__(self, link: Link, wire_out: int) -> None:
        self._link = link
        self._wire_out = wire_out
        self._writing = threading.Lock()
        self._session: dict[str, str] = {}  # headers of a session (up to 2025-11-25), once there is one
        self._greeting: Message | None = None  # the request that opened it
        self._greeting_again = threading.Lock()
        self._open: dict[int | str, HTTPConnection] = {}  # requests on their way
        self._requests: list[threading.Thread] = []

    def run(self, lines: Iterable[bytes]) -> None:
        """Relay lines until they end."""
        for line in lines:
            if line.strip():
                self._accept(line)
        until = time.monotonic() + LAST_ANSWERS_S
        for thread in self._requests:
            thread.join(max(0.0, until - time.monotonic()))

    def end_session(self) -> None:
        """Tell the server that the client is gone: what still runs for it is cancelled."""
        if self._session:
            with suppress(*LOST):
                connection = self._link.send("DELETE", self._session)
                connection.sock.settimeout(LAST_ANSWERS_S)
                connection.getresponse()

    def _accept(self, line: bytes) -> None:
        try:
            message = parse(line)
        except NoMessage as error:
            self._write(error.answer)
            return
        if message.method == "notifications/cancelled" and self._abandon(message):
            return
        try:
            # Sent here and not in a thread, so that messages arrive in the client's order.
            connection = self._link.send("POST", message.headers or self._session, message.line)
        except LOST as error:
            self._lose(message, error)
            return
        except ValueError as error:  # what it names fits into no header
            self._write(error_message(message.id, INVALID_REQUEST, f"The message cannot be sent: {error}."))
            return
        if message.id is None or message.method == "initialize":
            self._finish(message, connection)  # later messages build on these
        else:
            self._open[message.id] = connection
            self._requests = [*(thread for thread in self._requests if thread.is_alive())]
            self._requests.append(_start(self._finish, message, connection))
        if message.method == "notifications/initialized" and self._session:
            _start(self._follow, {})

    def _abandon(self, cancelled: Message) -> bool:
        """Close the stream of a stateless request, which cancels it. A session gets the message instead."""
        number = cancelled.params.get("requestId")
        if self._session or not isinstance(number, int | str):
            return False
        connection = self._open.pop(number, None)
        sock = None if connection is None else connection.sock  # the thread of the request may close it meanwhile
        if sock is not None:
            with suppress(OSError):  # the server was faster
                sock.shutdown(socket.SHUT_RDWR)
        return True

    def _finish(self, message: Message, connection: HTTPConnection) -> None:
        """Pass on what comes back for a message."""
        try:
            response = connection.getresponse()
            if response.status == NO_SESSION and self._session and not message.headers:
                self._done(connection, response)
                self._greet_again()
                connection = self._link.send("POST", self._session, message.line)
                response = connection.getresponse()
            if message.method == "initialize":
                self._open_session(message, response)
            else:
                self._pass_on(message, response)
            self._done(connection, response)
        except LOST as error:
            connection.close()
            if message.id is None or not message.headers or message.id in self._open:
                self._lose(message, error)
        finally:
            if message.id is not None:
                self._open.pop(message.id, None)

    def _done(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        """Read a response to its end, so that its connection can be used again."""
        response.read()
        self._link.give_back(connection, response)

    def _pass_on(self, message: Message, response: HTTPResponse) -> bytes:
        """Write everything that comes back for a message; return the last of it."""
        if response.headers.get_content_type() == "text/event-stream":
            return self._stream(message, response)
        body = response.read()
        if response.status >= 400 and message.id is not None:
            body = refusal(message.id, response.status, body)
        elif response.status >= 400:
            _complain(f"the server refused {message.method} ({response.status})")
            return b""
        if body:
            self._write(body)
        return body

    def _stream(self, message: Message, response: HTTPResponse) -> bytes:
        """Pass on the messages of a stream. If it breaks in a session, resume it."""
        last_id: str | None = None
        try:
            for event in events_in(response):
                last_id = event.id or last_id
                if event.data:
                    self._write(event.data)
                    if answers(event.data, message.id):
                        return event.data
        except LOST:
            if last_id is None or message.headers:
                raise
        if last_id is None or message.headers:
            raise HTTPException("the answer was cut off")
        return self._follow({"Last-Event-ID": last_id}, message)

    def _follow(self, place: dict[str, str], request: Message | None = None) -> bytes:
        """Pass on what a session's server sends by itself, or the rest of an answer, however often it breaks off."""
        failures = 0
        while failures < RETRIES:
            failures += 1
            with suppress(*LOST):
                connection = self._link.send("GET", {**self._session, **place})
                response = connection.getresponse()
                if response.status != 200:
                    return self._pass_on(request, response) if request is not None else b""
                for event in events_in(response):
                    failures = 0
                    place = {"Last-Event-ID": event.id} if event.id else place
                    if event.data:
                        self._write(event.data)
                        if request is not None and answers(event.data, request.id):
                            return event.data
            time.sleep(RETRY_S)
        if request is not None:
            raise HTTPException("it was lost and does not come back")
        return b""

    def _open_session(self, greeting: Message, response: HTTPResponse) -> None:
        """Pass on the answer to `initialize`, and remember the session it opened."""
        session = response.headers.get("mcp-session-id")
        answer = self._pass_on(greeting, response)
        if not answer:
            self._write(error_message(greeting.id, SERVER_ERROR, "The server's answer is empty."))
            return
        result = json.loads(answer).get("result")
        if session is not None and result is not None:
            self._greeting = greeting
            self._session = _session(session, result)

    def _greet_again(self) -> None:
        """Open a new session in place of one that the server has forgotten, because it restarted or was not used."""
        old = self._session
        with self._greeting_again:
            if self._session is not old or self._greeting is None:
                return
            connection = self._link.send("POST", {}, self._greeting.line)
            response = connection.getresponse()
            [result] = [json.loads(event.data)["result"] for event in events_in(response) if event.data]
            self._session = _session(response.headers["mcp-session-id"], result)
            self._done(connection, response)
            connection = self._link.send("POST", self._session, INITIALIZED)
            self._done(connection, connection.getresponse())
            _start(self._follow, {})

    def _lose(self, message: Message, error: Exception) -> None:
        """Tell the client that the server cannot be reached."""
        text = f"No connection to the server at {self._link.url}: {error}. Is `mcp-sandbox serve` running there?"
        if message.id is None:
            _complain(text)
        else:
            self._write(error_message(message.id, SERVER_ERROR, text))

    def _write(self, line: bytes) -> None:
        rest = memoryview(line + b"\n")
        with self._writing, suppress(BrokenPipeError):  # the client is gone, and stdin will end
            while rest:
                rest = rest[os.write(self._wire_out, rest) :]


def _session(session_id: str, result: dict[str, Any]) -> dict[str, str]:
    return {"MCP-Session-Id": session_id, "MCP-Protocol-Version": result["protocolVersion"]}


def _start(work: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _complain(text: str) -> None:
    sys.stderr.write(f"mcp-sandbox: {text}\n")
