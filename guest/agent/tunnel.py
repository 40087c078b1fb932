"""Carries connections to this machine's loopback to the host, each as one stream of the agent channel.

And the other way: the host may connect to a port on the loopback, whether or not the machine has a network.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH101, PTH108

import errno
import os
import select
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Any

from guest.agent.loop import Link, Loop
from guest.errors import ProtocolError
from guest.streams import CHUNK, GUEST_WINDOW, LEAST_GUEST_WINDOW, MAX_STREAMS, OPENS_PER_S, WINDOW, OpenRate

PORT = 3128  # where proxies usually listen
SOCKET = "/run/mcp-sandbox/proxy.sock"
BACKLOG = 128
SEND_BUFFER = 128 * 1024  # bytes; Linux would take 2.5 MB for a connection that is not read: more than its share
# Bytes that are reported together: few enough for the least share, because streams that open later shrink a share.
REPORT = LEAST_GUEST_WINDOW // 2
EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Connection:
    """One connection, and how far each direction has come."""

    def __init__(self, number: int, peer: socket.socket) -> None:
        self.number = number
        self.peer = peer
        self.credit = WINDOW  # bytes that the host takes
        self.unwritten = bytearray()  # from the host
        self.written = 0  # bytes since the last window frame
        self.read_all = False  # the peer has ended; the host knows
        self.host_ended = False
        self.connecting = False

    @property
    def finished(self) -> bool:
        """Whether both directions have ended."""
        return self.read_all and self.host_ended and not self.unwritten


class Tunnel:
    """Listens on loopback while the machine may open streams."""

    def __init__(self, loop: Loop, channel: Link) -> None:
        self._loop = loop
        self._channel = channel
        self._listening: list[socket.socket] = []
        self._delayed: set[socket.socket] = set()  # those that accept again when the rate allows it
        self._open: dict[int, Connection] = {}
        self._last = 0
        self._rate = OpenRate(time.monotonic())
        self._waiting: dict[int, None] = {}  # streams that may have something to read while the host is slow, in order
        channel.on_drained.append(self._resume)

    def listen(self) -> None:
        """Accept connections from now on."""
        if self._listening:
            return
        with suppress(FileNotFoundError):
            os.unlink(SOCKET)
        for family, address in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_UNIX, SOCKET)):
            listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
            listening.bind(address)
            listening.listen(BACKLOG)
            self._listening.append(listening)
            self._loop.add(listening.fileno(), partial(self._accept, listening))
        os.chmod(SOCKET, 0o666)  # noqa: S103 - for code, whatever user it runs as

    @property
    def in_use(self) -> bool:
        """Whether any stream is open."""
        return bool(self._open)

    def close(self) -> None:
        """End all streams and listen no more."""
        for listening in self._listening:
            self._loop.remove(listening.fileno())
            listening.close()
        self._listening.clear()
        for connection in list(self._open.values()):
            self._reset(connection)

    def take(self, header: dict[str, Any], body: bytes) -> None:
        """Take a frame of a stream from the host."""
        if header["do"] == "open":
            self._connect(int(header["stream"]), int(header["port"]))
            return
        connection = self._open.get(header["stream"])
        if connection is None:  # it was reset here while the frame was on its way
            return
        what = header["do"]
        if what == "data":
            connection.unwritten += body
            if len(connection.unwritten) > GUEST_WINDOW:
                raise ProtocolError("the host sends more than a stream's window")
            self._write(connection)
        elif what == "window":
            connection.credit += int(header["bytes"])
            self._read(connection)
        elif what == "end":
            connection.host_ended = True
            self._write(connection)
        elif what == "reset":
            self._drop(connection)
        else:
            raise ProtocolError(f"streams do not know {str(what)[:40]!r}")

    def _connect(self, number: int, port: int) -> None:
        """Connect a stream of the host to a port."""
        peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        connection = self._open[number] = Connection(number, peer)
        connection.connecting = True
        if peer.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS):
            self._loop.add(peer.fileno(), partial(self._ready, connection), EVENTS)
        else:
            self._reset(connection)

    def _connected(self, connection: Connection) -> None:
        connection.connecting = False
        if connection.peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._reset(connection)
        else:
            self._send(connection, "opened")

    def _resume(self) -> None:
        """Read on, in turn: the host takes frames again."""
        while self._waiting and not self._channel.full:
            number = next(iter(self._waiting))
            del self._waiting[number]
            if connection := self._open.get(number):
                self._send_piece(connection)

    def _accept(self, listening: socket.socket, _events: int = 0) -> None:
        while listening in self._listening and len(self._open) < MAX_STREAMS:
            if not self._rate.take(time.monotonic()):
                self._accept_later(listening)
                return
            try:
                peer, _ = listening.accept()
            except OSError:  # none is waiting, or the one that was is gone
                self._rate.give_back()
                return
            peer.setblocking(False)
            self._last += 1
            connection = self._open[self._last] = Connection(self._last, peer)
            self._send(connection, "open")
            self._loop.add(peer.fileno(), partial(self._ready, connection), EVENTS)

    def _accept_later(self, listening: socket.socket) -> None:
        def accept() -> None:
            self._delayed.discard(listening)
            self._accept(listening)

        if listening not in self._delayed:
            self._delayed.add(listening)
            self._loop.later(1 / OPENS_PER_S, accept)

    def _ready(self, connection: Connection, events: int) -> None:
        if connection.connecting:
            self._connected(connection)
        if events & select.EPOLLOUT:
            self._write(connection)
        if events & ~select.EPOLLOUT:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        """Send one piece to the host, or queue behind the streams that wait for it to take more."""
        if self._channel.full or (self._waiting and self._channel.unsent):
            self._waiting[connection.number] = None
        else:
            self._send_piece(connection)

    def _send_piece(self, connection: Connection) -> None:
        """Send one piece to the host; the next one after the other streams had a turn."""
        if connection.number not in self._open or connection.read_all or connection.credit <= 0:
            return
        size = min(CHUNK, connection.credit)
        try:
            data = connection.peer.recv(size)
        except BlockingIOError:
            return
        except OSError:
            self._reset(connection)
            return
        if not data:
            connection.read_all = True
            self._send(connection, "end")
            self._drop_finished(connection)
            return
        connection.credit -= len(data)
        self._send(connection, "data", data)
        self._loop.soon(partial(self._read, connection))

    def _write(self, connection: Connection) -> None:
        if connection.number not in self._open:
            return
        try:
            while connection.unwritten:
                size = connection.peer.send(connection.unwritten)
                del connection.unwritten[:size]
                connection.written += size
        except BlockingIOError:
            pass
        except OSError:
            self._reset(connection)
            return
        if connection.written >= REPORT:
            self._channel.send({"stream": connection.number, "do": "window", "bytes": connection.written})
            connection.written = 0
        if connection.host_ended and not connection.unwritten:
            with suppress(OSError):
                connection.peer.shutdown(socket.SHUT_WR)
            self._drop_finished(connection)

    def _send(self, connection: Connection, what: str, body: bytes = b"") -> None:
        self._channel.send({"stream": connection.number, "do": what}, body)

    def _drop_finished(self, connection: Connection) -> None:
        if connection.finished:
            self._drop(connection)

    def _reset(self, connection: Connection) -> None:
        self._send(connection, "reset")
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection and take the next one that waits."""
        del self._open[connection.number]
        self._loop.remove(connection.peer.fileno())
        connection.peer.close()
        for listening in list(self._listening):
            self._loop.soon(partial(self._accept, listening))
