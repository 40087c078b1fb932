"""Starts a program with the privileges of code, in a new session, and keeps the end of its output."""

import os
from collections.abc import Mapping, Sequence

from guest.agent.loop import Loop
from guest.agent.user import User
from guest.prctl import become_subreaper
from guest.processes import reset_signals

NOT_STARTED = 127  # the exit code of shells for a program that is not found
PIPE_BYTES = 64 * 1024  # the capacity of a pipe
KEPT_BYTES = 16 * 1024  # of a program's output
REST_S = 0.005  # between two reads: a program that writes more than 12 MB/s waits, and the agent does not


def launch(user: User, command: Sequence[str], *, env: Mapping[str, str], cwd: str, output: int, oom_score: int) -> int:
    """Start a program; returns its pid. Its orphans become its children, not the agent's.

    Its environment is the machine's plus `env`. If it cannot be started, the reason goes to `output`.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        become_subreaper()
        reset_signals()
        user.drop_privileges(oom_score=oom_score)
        os.chdir(cwd)
        os.execvpe(command[0], list(command), {**os.environ, **env})  # noqa: S606 - no shell unless asked for
    except BaseException as error:  # this process ends here in any case
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


class Tail:
    """A pipe for the output of programs, of which the end is kept."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._kept = b""
        self._resting = False
        self._fd, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        loop.add(self._fd, lambda _events: self._read())

    def close_writer(self) -> None:
        """Close our own writing end: then the pipe ends with the last program that has it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def clear(self) -> None:
        """Discard the output so far."""
        self._take()
        self._kept = b""

    def text(self, size: int) -> str:
        """Return the last `size` characters of the output so far."""
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
