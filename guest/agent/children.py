"""Reaps every child of the agent: the zygote, kernels, shells, services, and orphans that code leaves behind."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from guest.agent.loop import Loop
from guest.prctl import become_subreaper

PIPE_BYTES = 64 * 1024  # the capacity of a pipe: a full one would not report the next signal


class Children:
    """Reaps all children and reports the end of those that are watched.

    The agent adopts orphans, so it reaps everything that code starts, and no zombies stay.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._watched: dict[int, Callable[[int], None]] = {}
        become_subreaper()
        self._wakeup, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        loop.add(self._wakeup, self._wake)

    @property
    def watched(self) -> set[int]:
        """The children whose end is reported."""
        return set(self._watched)

    def watch(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call `ended(status)` when this child has ended, with a status as `waitpid` gives it."""
        self._watched[pid] = ended

    def reap(self, *, until: int = 0) -> None:
        """Reap those that have ended; with `until`, wait for that one and reap all that end before it."""
        options = 0 if until else os.WNOHANG
        while True:
            try:
                pid, status = os.waitpid(-1, options)
            except ChildProcessError:
                return
            if not pid:
                return
            # After the other events of this round: one of them may be the zygote's report of this very process.
            self._loop.soon(partial(self._report, pid, status))
            if pid == until:
                return

    def _wake(self, _events: int) -> None:
        with suppress(BlockingIOError):
            os.read(self._wakeup, PIPE_BYTES)
        self.reap()

    def _report(self, pid: int, status: int) -> None:
        if ended := self._watched.pop(pid, None):
            ended(status)
