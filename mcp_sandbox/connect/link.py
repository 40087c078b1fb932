"""HTTP connections to one server, and the events of its streams."""

import select
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

CONNECT_S = 10.0
KEEP_S = 3.0  # how long an idle connection is used again; servers close theirs after 5 s
DEFAULT_PATH = "/mcp"


class BadAddress(Exception):
    """The server has no such address, or no such token."""


class Link:
    """Connections to one address. A connection carries one request at a time and is then used again."""

    def __init__(self, url: str, token: str | None) -> None:
        wrong = BadAddress(f"{url} is not the address of a server, such as http://127.0.0.1:8000/mcp")
        try:
            parts = urlsplit(url)
            port = parts.port  # looked at only here, and may be no number
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        token = token.strip() if token else None  # files end with a newline
        if token and not (token.isascii() and token.isprintable()):
            raise BadAddress("the token has characters that no token has")
        self.url = url
        self._class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        # Without a port http.client would look for one in the host, and find it in ::1.
        self._host, self._port = parts.hostname, port or self._class.default_port
        self._path = parts.path if parts.path not in ("", "/") else DEFAULT_PATH
        self._headers = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        self._idle: list[tuple[float, HTTPConnection]] = []
        self._lock = threading.Lock()

    def send(self, method: str, headers: Mapping[str, str], body: bytes | None = None) -> HTTPConnection:
        """Send a request, and return the connection on which its answer will come.

        Raises:
            OSError, HTTPException: the server cannot be reached.
        """
        connection = self._take()
        try:
            connection.request(method, self._path, body, {**self._headers, **headers})
        except BaseException:
            connection.close()
            raise
        return connection

    def give_back(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        """Keep a connection whose answer was read to its end; close others."""
        if response.isclosed() and connection.sock is not None:
            with self._lock:
                self._idle.append((time.monotonic(), connection))
        else:
            connection.close()

    def _take(self) -> HTTPConnection:
        while True:
            with self._lock:
                since, connection = self._idle.pop() if self._idle else (0.0, None)
            if connection is None:
                break
            if time.monotonic() - since < KEEP_S and not _closed_by_server(connection):
                return connection
            connection.close()
        connection = self._class(self._host, self._port, timeout=CONNECT_S)
        connection.connect()
        connection.sock.settimeout(None)  # an answer takes as long as its run
        return connection


def _closed_by_server(connection: HTTPConnection) -> bool:
    return bool(select.select([connection.sock], [], [], 0)[0])  # nothing was asked, so only an end can be there


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a stream. Without data it is a place to come back to."""

    id: str | None
    data: bytes


def events_in(response: HTTPResponse) -> Iterator[Event]:
    """Yield the events of a stream (`text/event-stream`)."""
    event_id: str | None = None
    data: list[bytes] = []
    while line := response.readline():
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"id":
            event_id = value.decode()
        elif not name and not value and (data or event_id):  # an empty line; a comment has a value
            yield Event(event_id, b"\n".join(data))
            event_id, data = None, []
