"""Keeps processes waiting for jobs: forks of a process that has imported everything, one for each job."""

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress

SPARE = 2  # processes that wait for a job
MOST = 6  # processes at the same time; in gVisor a job takes 120 MB, because a fork copies what it touches
PAUSE_S = 0.1  # after a process that ended without a job or could not start: forking on would only make it worse
READY, BUSY = b"r", b"j"  # what a process tells: it is about to wait for a job; it has one

Tell = Callable[[bytes], None]
Serve = Callable[[Tell], None]  # takes one job, and tells when it is READY for it and BUSY with it


class Workers:
    """The processes. Each has a pipe to here, which says what it does, and by its end that it is gone."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._pipes = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}  # by the reading end of the pipe
        self._starting: set[int] = set()
        self._idle: set[int] = set()
        self._busy: set[int] = set()

    def start(self) -> None:
        """Start the processes that should wait, and return when they do."""
        while len(self._idle) < self._wanted():
            self._fill_up()
            self._listen()

    def run(self) -> None:
        """Replace processes for ever."""
        while True:
            self._fill_up()
            self._listen()

    def stop(self) -> None:
        """End all processes."""
        for fd, pid in list(self._pids.items()):
            os.kill(pid, signal.SIGKILL)
            self._forget(fd)

    def _wanted(self) -> int:
        """Return how many processes should wait: while a job runs, only one, because to start one takes CPU time."""
        return 1 if self._busy else SPARE

    def _is_short(self) -> bool:
        return len(self._starting | self._idle) < self._wanted() and len(self._pids) < MOST

    def _fill_up(self) -> None:
        with suppress(OSError):  # no memory, or too many processes: the next try is after PAUSE_S
            while self._is_short():
                self._fork()

    def _listen(self) -> None:
        for key, _ in self._pipes.select(PAUSE_S if self._is_short() else None):
            self._hear(key.fd)

    def _hear(self, fd: int) -> None:
        said = os.read(fd, 1)
        if said:
            self._starting.discard(fd)
            self._idle.discard(fd)
            (self._idle if said == READY else self._busy).add(fd)
            return
        wasted = fd not in self._busy
        self._forget(fd)
        if wasted:
            time.sleep(PAUSE_S)

    def _forget(self, fd: int) -> None:
        for state in (self._starting, self._idle, self._busy):
            state.discard(fd)
        self._pipes.unregister(fd)
        os.close(fd)
        os.waitpid(self._pids.pop(fd), 0)

    def _fork(self) -> None:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid:
            os.close(writer)
            self._pids[reader] = pid
            self._starting.add(reader)
            self._pipes.register(reader, selectors.EVENT_READ)
            return
        try:
            for fd in (reader, *self._pids):
                os.close(fd)
            self._serve(lambda state: _tell(writer, state))
        finally:
            os._exit(0)


def _tell(pipe: int, state: bytes) -> None:
    os.write(pipe, state)
