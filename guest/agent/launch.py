"""Starts a program with the rights of code, in a session of its own, and keeps the end of what it says."""

import os
from collections.abc import Mapping, Sequence

from guest.agent.loop import Loop
from guest.agent.rights import take_in_orphans
from guest.agent.user import User
from guest.programs import reset_signals

NOT_STARTED = 127  # the exit code that shells have for it, too
PIPE_BYTES = 64 * 1024  # all that fits a pipe
KEPT_BYTES = 16 * 1024  # of what a program says
REST_S = 0.005  # between two reads: a program that says more than 12 MB/s has to wait, not the agent


def launch(user: User, command: Sequence[str], *, env: Mapping[str, str], cwd: str, output: int, oom_score: int) -> int:
    """Start a program; returns its process id. What it leaves behind stays below it, as far as it lives itself.

    It finds the machine's variables and then `env`. If it cannot be started, `output` says why.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        take_in_orphans()
        reset_signals()
        # A machine with users of its own is limited as a whole, by the host. There a limit inside may be one for memory
        # in sight, of which programs in Go or Java have more than there is.
        user.let_loose(oom_score=oom_score, watched=not user.shares_id)
        os.chdir(cwd)
        os.execvpe(command[0], list(command), {**os.environ, **env})  # noqa: S606 - no shell unless asked for
    except BaseException as error:  # the process ends here, whatever it is
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


class Tail:
    """A pipe for what programs say, of which the end is kept."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._kept = b""
        self._resting = False
        self._fd, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        loop.add(self._fd, lambda _events: self._read())

    def leave_to_programs(self) -> None:
        """Close our own end for writing: when the last program has ended there is nothing more to come."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def forget(self) -> None:
        """Keep nothing of what was said so far."""
        self._take()
        self._kept = b""

    def text(self, size: int) -> str:
        """The last `size` characters of all that was said so far."""
        self._take()
        return self._kept.decode("utf-8", "replace").strip()[-size:]

    def _read(self) -> None:
        if not self._resting and self._take():
            self._resting = True
            self._loop.later(REST_S, self._wake)

    def _wake(self) -> None:
        self._resting = False
        self._read()

    def _take(self) -> bool:
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._kept = (self._kept + data)[-KEPT_BYTES:]
        return bool(data)
