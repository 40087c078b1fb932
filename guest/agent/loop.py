"""The agent's event loop: one thread, edge-triggered epoll, a few timers.

Smaller than asyncio on purpose: on an emulated CPU every Python instruction costs twenty times as much, and this is on
the path of every run. Edge-triggered, because a virtio port reports a hang-up for as long as no host is connected;
level-triggered polling would spin.
"""

import errno
import heapq
import os
import select
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from guest.errors import ProtocolError
from guest.protocol import Decoder, Frame, encode

READ_BYTES = 64 * 1024
HIGH_WATER = 1024 * 1024  # unsent bytes above which a link is full
TURN_READS = 16  # of one link, before all others have a turn
EDGE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
ENDED = select.EPOLLHUP | select.EPOLLRDHUP
BOTH = EDGE | select.EPOLLOUT


class Loop:
    """Calls handlers when their file descriptor is ready, and timers when they are due."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._soon: list[Callable[[], None]] = []
        self._count = 0
        self._now = time.monotonic()  # read once a round: in gVisor that is a slow system call
        self.unflushed: set[Link] = set()
        self._stopped = False

    def add(self, fd: int, handler: Callable[[int], None], events: int = EDGE) -> None:
        """Call `handler(events)` on every event of `fd`."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def look_again(self, fd: int, events: int) -> None:
        """Report the current state of `fd` once more, even if it has not changed."""
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Forget a descriptor. Call it before closing the descriptor."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def soon(self, action: Callable[[], None]) -> None:
        """Call `action` after the pending events: a busy handler yields to the others this way."""
        self._soon.append(action)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after a delay. It must check for itself whether it is still wanted."""
        self._count += 1
        self._now = time.monotonic()  # so that what a handler took does not delay the timer
        heapq.heappush(self._timers, (self._now + delay_s, self._count, action))

    def stop(self) -> None:
        """End `run` after this round."""
        self._stopped = True

    def run(self) -> None:
        """Serve until `stop` is called."""
        while not self._stopped:
            timeout = -1.0
            if self._soon:
                timeout = 0.0
            elif self._timers:
                timeout = max(0.0, self._timers[0][0] - self._now)
            events_by_fd = self._epoll.poll(timeout)
            self._now = now = time.monotonic()
            for fd, events in events_by_fd:
                if handler := self._handlers.get(fd):  # an earlier handler of this round may have removed it
                    _call(handler, events)
            if self._soon:
                actions, self._soon = self._soon, []
                for action in actions:
                    _call(action)
            while self._timers and self._timers[0][0] <= now:
                _call(heapq.heappop(self._timers)[2])
            while self.unflushed:  # all frames of one round go out in one write
                _call(self.unflushed.pop().flush)


def _call(action: Callable[..., None], *arguments: int) -> None:
    """Call what is due. If it fails, that is printed, and the loop goes on: the sandbox must not lose its machine."""
    try:
        action(*arguments)
    except Exception:
        sys.excepthook(*sys.exc_info())


class Link:
    """Frames over a pair of non-blocking descriptors in the loop, which may be the same one.

    Without descriptors it is closed until it is attached to some. It can be attached again after it was closed.
    `on_nonsense` is called when a frame is invalid or cannot be handled; without it, the link looks for the next frame.
    """

    def __init__(
        self,
        loop: Loop,
        fds: tuple[int, int] | None,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[], None],
        on_nonsense: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._in, self._out = -1, -1
        self._on_frame, self._on_end, self._on_nonsense = on_frame, on_end, on_nonsense
        self._decoder = Decoder(seeking=on_nonsense is None)
        self._unsent = bytearray()
        self._held_up = False  # the peer does not read; the loop reports when it does again
        self._by_piece = False  # a short read does not mean that nothing is left
        self.closed = True
        self.reads = 0
        self.on_drained: list[Callable[[], None]] = []
        if fds is not None:
            self.attach(fds)

    @property
    def unsent(self) -> int:
        """Bytes that wait for the peer to read."""
        return len(self._unsent)

    @property
    def full(self) -> bool:
        """Whether so much waits for the peer that nothing more should be sent until `on_drained` is called."""
        return len(self._unsent) > HIGH_WATER

    def attach(self, fds: tuple[int, int]) -> None:
        """Use these descriptors from now on."""
        self._in, self._out = fds
        self._by_piece = stat.S_ISCHR(os.fstat(self._in).st_mode)  # a virtio port
        self.closed = self._held_up = False
        for fd in {*fds}:
            os.set_blocking(fd, False)
        self._loop.add(self._in, self._ready)

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame at the end of this round of the loop, or when the peer reads."""
        if not self.closed:
            self._unsent += encode(header, body)
            self._loop.unflushed.add(self)

    def flush(self) -> None:
        """Write as much as the peer takes; the loop calls again when it takes more."""
        if self._unsent and not self.closed:
            awaited = self._held_up or self.full
            del self._unsent[: self._write(self._unsent)]
            if bool(self._unsent) is not self._held_up:
                self._held_up = not self._held_up
                self._watch_writing()
            if awaited and not self._unsent:  # even if the peer took everything at once
                for action in self.on_drained:
                    action()

    def close(self) -> None:
        """Remove the descriptors from the loop and close them. Unsent frames are lost."""
        if not self.closed:
            self.closed = True
            self._unsent.clear()
            self._decoder.resync()
            for fd in {self._in, self._out}:
                self._loop.remove(fd)
                os.close(fd)

    def _watch_writing(self) -> None:
        """Watch for writability only while the peer does not read: it would be reported after every read."""
        if self._in == self._out:
            self._loop.look_again(self._in, BOTH if self._held_up else EDGE)
        elif self._held_up:
            self._loop.add(self._out, self._writable, select.EPOLLOUT | select.EPOLLET)
        else:
            self._loop.remove(self._out)

    def _write(self, data: bytearray) -> int:
        done = 0
        with memoryview(data) as view:
            while done < len(view):
                try:
                    done += os.write(self._out, view[done:])
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENODEV):
                        raise
                    return len(view)  # the peer is gone; reading reports that, too
        return done

    def _writable(self, _events: int) -> None:
        if self._unsent:
            self.flush()

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._writable(events)
        if events & ~select.EPOLLOUT:
            self._read(ended=bool(events & ENDED))

    def _read(self, *, ended: bool) -> None:
        for _ in range(TURN_READS):
            if self.closed:
                return
            try:
                self.reads += 1
                data = os.read(self._in, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_end()
                return
            # After a short read nothing is left in a pipe or socket; another read would only raise an exception.
            whole = len(data) < READ_BYTES and not ended
            self._take(data)
            if whole:
                if self._by_piece and not self.closed:
                    self._loop.look_again(self._in, BOTH if self._held_up else EDGE)
                return
        self._loop.soon(lambda: self._read(ended=ended))  # a flood must not hold up the other links

    def _take(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except Exception as error:  # the frame is invalid, or what it asks for is
            if not isinstance(error, ProtocolError):
                sys.excepthook(type(error), error, error.__traceback__)
            if self._on_nonsense is None:
                self._decoder.resync()
            else:
                self._on_nonsense()
