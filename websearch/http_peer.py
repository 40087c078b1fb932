"""HTTP/1.1 on a byte stream: h11 parses strictly, this module moves the bytes."""

from collections.abc import Iterable

import anyio
import h11
from anyio.abc import ByteStream

MAX_HEAD = 64 * 1024  # bytes of a request's or response's first line and headers
# Headers that concern one connection only, not the request as a whole. h11 writes the framing anew.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection "
    b"te trailer transfer-encoding upgrade".split()
)

Headers = list[tuple[bytes, bytes]]
HttpEvent = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]


class HttpPeer:
    """One end of an HTTP/1.1 connection."""

    def __init__(self, stream: ByteStream, role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        self.stream = stream
        self.http = h11.Connection(role, max_incomplete_event_size=MAX_HEAD)

    async def next_event(self) -> h11.Event | type[h11.PAUSED]:
        """Return what comes next. Raises h11.RemoteProtocolError for anything but strict HTTP/1.1."""
        while True:
            event: HttpEvent = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            try:
                data = await self.stream.receive()
            except anyio.EndOfStream:
                data = b""
            self.http.receive_data(data)

    async def send(self, event: h11.Event) -> None:
        """Send an event. Raises h11.LocalProtocolError if it does not fit."""
        data = self.http.send(event)
        if data:
            await self.stream.send(data)

    @property
    def unread(self) -> bytes:
        """What was received after a CONNECT request: not HTTP any more."""
        return self.http.trailing_data[0]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that are for the other end, without those for this connection."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in pairs if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in pairs if name not in HOP_BY_HOP and name not in named]
