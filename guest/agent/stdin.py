"""The open standard input of one run: bytes that the host sends while the run is active."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH108

import os
import select
from collections.abc import Callable
from contextlib import suppress

from guest.agent.loop import Loop
from guest.agent.user import User
from guest.errors import RequestRefused
from guest.stdin import WINDOW

WRITABLE = select.EPOLLOUT | select.EPOLLET


class OpenInput:
    """A FIFO, so that a kernel that runs already can open it. What does not fit into it waits, within the window."""

    def __init__(self, loop: Loop, user: User, taken: Callable[[int], None]) -> None:
        """`taken` gets the number of bytes that the host may send: at first, and when some were taken. Raises OSError.

        The FIFO is the user's and its name is random: code could put something else in its place, but nothing that
        the user may not open.
        """
        self._loop = loop
        self._taken = taken
        self._waiting = bytearray()
        self._ending = False
        self.path = f"/tmp/.stdin-{os.urandom(8).hex()}"  # noqa: S108 - the whole machine belongs to one owner
        flags = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with user.acting():
            os.mkfifo(self.path, 0o600)
            self.reader = os.open(self.path, os.O_RDONLY | flags)  # keeps input until a process opens the FIFO
            self._writer = os.open(self.path, os.O_WRONLY | flags)
        os.set_blocking(self.reader, True)  # the agent never reads; a shell gets it as its own
        loop.add(self._writer, lambda _events: self._write(), WRITABLE)
        taken(WINDOW)

    def take(self, data: bytes, *, end: bool) -> None:
        """Take input; after the last of it readers find the end. Raises RequestRefused beyond the window."""
        if self._writer < 0 or self._ending:
            return
        if len(self._waiting) + len(data) > WINDOW:
            raise RequestRefused("too_large", "more input than the run's window")
        self._waiting += data
        self._ending = end
        self._write()

    def close(self) -> None:
        """Discard what nothing has read."""
        self._close_writer()
        os.close(self.reader)
        with suppress(OSError):
            os.unlink(self.path)

    def _write(self) -> None:
        done = 0
        with suppress(BlockingIOError), memoryview(self._waiting) as view:
            while done < len(view):
                done += os.write(self._writer, view[done:])
        if done:
            del self._waiting[:done]
            self._taken(done)
        if self._ending and not self._waiting:
            self._close_writer()

    def _close_writer(self) -> None:
        if self._writer >= 0:
            self._loop.remove(self._writer)
            os.close(self._writer)
            self._writer = -1
