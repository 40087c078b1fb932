"""The process that has everything imported and forks kernels: a new one is there in milliseconds.

The agent starts it with the user's rights as JSON, the language, and a socket on descriptor 3. It keeps root's
rights, where it has any, so the code it lets loose in its children cannot touch it. Messages are JSON, one a packet:

    agent → zygote   {"op": "warm", "code"}   {"op": "fork", "figures"} or {"op": "become", "figures"}, each with three
                     descriptors
    zygote → agent   {"event": "warmed", "error"}   {"event": "forked", "pid"}
"""

import gc
import json
import os
import socket
import sys
import traceback
import warnings
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast

from guest.agent.languages import MEMORY_WATCHERS
from guest.agent.rights import gain_nothing_by_exec, show_memory
from guest.agent.user import User

SOCKET_FD = 3
MAX_PACKET = 192 * 1024  # bytes; below the kernel's default socket buffer


class Kernel(Protocol):
    """What the module of a language has."""

    def prepare(self) -> None:
        """Import and build everything a kernel needs, once, before any is forked."""

    def warm(self, code: str) -> None:
        """Run warm-up code; whatever it raises is told to the template's builder."""

    def serve(self, control_fd: int, figures: int) -> None:
        """Be the live kernel of this process until the agent is gone."""


class Zygote:
    """Serves the agent's orders, one after the other."""

    def __init__(self, control: socket.socket, user: User, kernel: Kernel, *, watched: bool) -> None:
        self._control = control
        self._user = user
        self._kernel = kernel
        self._watched = watched  # the kernel looks after the memory of what it runs

    def serve(self) -> None:
        """Work until the agent is gone, or until this is a kernel."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET, 3)
            if not data:
                return
            order = json.loads(data)
            if order["op"] == "warm":
                self._report(event="warmed", error=self._warm(order["code"]))
            elif order["op"] == "fork":
                self._fork(order["figures"], fds)
            else:
                self._become_kernel(order["figures"], fds)

    def _report(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        self._control.send(json.dumps(message).encode())

    def _warm(self, code: str) -> str | None:
        """Run a template's warm-up code; its imports are what every kernel starts with."""
        try:
            self._kernel.warm(code)
        except BaseException:  # whatever it is, the builder of the template has to see it
            return f"the warm-up code failed:\n{traceback.format_exc()[-8000:]}"
        finally:
            gc.collect()
            gc.freeze()  # children share these pages for longer when the collector leaves them alone
        return None

    def _fork(self, figures: int, fds: list[int]) -> None:
        """Fork a kernel that is an orphan at once, so that the agent takes it in and hears of its end from the system.

        The agent knows the process before it can end: its parent says who it is and leaves it only then.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's idle threads do not survive a fork and need not
            parent = os.fork()
            if parent == 0:
                self._fork_and_leave(figures, fds)
        for fd in fds:
            os.close(fd)
        if os.waitpid(parent, 0)[1]:
            raise SystemExit("cannot fork")

    def _fork_and_leave(self, figures: int, fds: list[int]) -> NoReturn:
        status = 1
        try:
            pid = os.fork()
            if pid == 0:
                self._become_kernel(figures, fds)
            self._report(event="forked", pid=pid)
            status = 0
        finally:
            os._exit(status)

    def _become_kernel(self, figures: int, fds: list[int]) -> NoReturn:
        status = 1
        try:
            self._control.close()
            self._user.let_loose(watched=self._watched)
            control, stdout, stderr = fds
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            self._kernel.serve(control, figures)
            status = 0
        except BaseException:  # the process ends here; its stderr reaches the agent
            traceback.print_exc()
        finally:
            os._exit(status)


def main() -> None:
    """Get ready, then serve."""
    user = User(*json.loads(sys.argv[1]))
    gain_nothing_by_exec()  # of all threads: those that libraries start may become a kernel's
    if user.shares_id:
        show_memory(shown=False)
    language = sys.argv[2]
    kernel = cast("Kernel", import_module(f"guest.kernels.{language}"))
    kernel.prepare()
    Zygote(socket.socket(fileno=SOCKET_FD), user, kernel, watched=language in MEMORY_WATCHERS).serve()


if __name__ == "__main__":
    main()
