"""Reads the standard output and error of code into the active run."""

import os
import select
from functools import partial

from guest.agent.execution import Execution
from guest.agent.loop import Link, Loop
from guest.agent.user import User

PIPE_BYTES = 64 * 1024  # read at once; also how much output between two runs is kept for the next
TURN_BYTES = 1024 * 1024  # read from one pipe before the others have a turn
DRAIN_BYTES = 64 * 1024 * 1024  # read at the end of a run; only a process that the run left behind writes more
REST_S = 0.005  # after a short piece of output: many small writes become few frames


class Streams:
    """Two pipes. They outlive a run, because processes that a run leaves behind go on writing to them."""

    def __init__(self, loop: Loop, channel: Link, user: User) -> None:
        self._loop = loop
        self._channel = channel
        self._run: Execution | None = None
        self._early: dict[str, bytes] = {"stdout": b"", "stderr": b""}  # output while no run is active
        self._resting: set[str] = set()
        self._pipes: dict[str, int] = {}
        self._waiting = select.poll()  # finds those with output, both with one system call
        self._closed = False
        self.writers: list[int] = []  # for stdout and stderr of the process that runs code
        for stream in self._early:
            read, write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read, False)
            if user.uid is not None and user.gid is not None:
                os.fchown(write, user.uid, user.gid)  # so that code can open /dev/stderr
            self._pipes[stream] = read
            self._waiting.register(read, select.POLLIN)
            self.writers.append(write)
            loop.add(read, partial(self._read, stream))

    def begin(self, run: Execution) -> None:
        """Give this run all output from now on, and what came since the last one."""
        self._run = run
        for stream, data in self._early.items():
            if data:
                run.feed(stream, data)
                self._early[stream] = b""

    def end(self) -> None:
        """Keep what comes from now on for the next run."""
        self._run = None

    def drain(self) -> None:
        """Read all that was written so far, so that later events come after it."""
        ready = dict(self._waiting.poll(0))  # reading an empty pipe would raise an exception
        for stream, fd in self._pipes.items():
            if ready.get(fd, 0) & select.POLLIN:
                self._read_until(stream, DRAIN_BYTES)

    def resume(self) -> None:
        """Read on: the host takes output again."""
        for stream in self._pipes:
            self._read(stream)

    def close_writers(self) -> None:
        """Close our copies of the writing ends, when the process that runs code has its own."""
        for fd in self.writers:
            os.close(fd)
        self.writers.clear()

    def close(self) -> None:
        """Stop reading."""
        self._closed = True
        for fd in self._pipes.values():
            self._loop.remove(fd)
            os.close(fd)

    def _read(self, stream: str, _events: int = 0) -> None:
        """Read output, but not while the host is slow to take it, and not in tiny pieces."""
        if self._closed or stream in self._resting or self._channel.full:
            return
        size = self._read_until(stream, TURN_BYTES)
        if size >= TURN_BYTES:
            self._loop.soon(lambda: self._read(stream))
        elif size:
            self._resting.add(stream)

            def wake() -> None:
                self._resting.discard(stream)
                self._read(stream)

            self._loop.later(REST_S, wake)

    def _read_until(self, stream: str, limit: int) -> int:
        fd = self._pipes[stream]
        size = 0
        while size < limit:
            try:
                data = os.read(fd, PIPE_BYTES)
            except BlockingIOError:
                break
            if not data:
                break
            size += len(data)
            if self._run:
                self._run.feed(stream, data)
            else:
                self._early[stream] = (self._early[stream] + data)[-PIPE_BYTES:]
            if len(data) < PIPE_BYTES:
                break
        return size
