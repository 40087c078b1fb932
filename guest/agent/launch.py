"""Starts a program with the rights of code, in a session of its own, and keeps the end of what it says."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH123

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from guest.agent.loop import Loop
from guest.agent.rights import take_in_orphans
from guest.agent.user import User

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
        os.setsid()
        take_in_orphans()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program would inherit that
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(oom_score))
        with suppress(OSError):  # the agent is above all that it starts
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        user.become()
        os.chdir(cwd)
        known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # that is the agent's
        os.execvpe(command[0], list(command), {**known, **env})  # noqa: S606 - no shell unless asked for
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
