"""Keeps processes waiting for jobs: forks of a process that has imported everything, one for each job."""

import os
import selectors
import signal
import time
from collections.abc import Callable

SPARE = 2  # processes that wait for a job
MOST = 6  # processes at the same time; in gVisor a job takes 120 MB, because a fork copies what it touches
PAUSE_S = 0.1  # after a process that ended without a job: something is wrong, and forking on would only make it worse

Serve = Callable[[Callable[[], None]], None]  # takes one job, and calls back when it has arrived


class Workers:
    """The processes. Each has a pipe to here: a byte says that it has a job, the end that it is gone."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._pipes = selectors.DefaultSelector()
        self._idle: dict[int, int] = {}  # reading end of the pipe → pid
        self._busy: dict[int, int] = {}

    def fill_up(self) -> None:
        """Start as many processes as should wait."""
        while len(self._idle) < SPARE and len(self._idle) + len(self._busy) < MOST:
            self._fork()

    def run(self) -> None:
        """Replace processes for ever."""
        while True:
            self.fill_up()
            for key, _ in self._pipes.select():
                self._hear(key.fd)

    def stop(self) -> None:
        """End all processes."""
        for fd, pid in [*self._idle.items(), *self._busy.items()]:
            os.kill(pid, signal.SIGKILL)
            self._forget(fd)

    def _hear(self, fd: int) -> None:
        if os.read(fd, 1):
            self._busy[fd] = self._idle.pop(fd)
            return
        wasted = fd in self._idle
        self._forget(fd)
        if wasted:
            time.sleep(PAUSE_S)

    def _forget(self, fd: int) -> None:
        pid = self._idle.pop(fd, None) or self._busy.pop(fd)
        self._pipes.unregister(fd)
        os.close(fd)
        os.waitpid(pid, 0)

    def _fork(self) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writer)
            self._idle[reader] = pid
            self._pipes.register(reader, selectors.EVENT_READ)
            return
        try:
            for fd in (reader, *self._idle, *self._busy):
                os.close(fd)
            self._serve(lambda: _tell(writer))
        finally:
            os._exit(0)


def _tell(pipe: int) -> None:
    os.write(pipe, b"j")
