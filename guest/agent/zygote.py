"""The process that has everything imported and forks kernels within milliseconds.

The agent starts it with the user as JSON, the language, and a socket on descriptor 3. If the agent is root, so is the
zygote, and the code in its children cannot touch it. Messages are JSON, one in each packet:

    agent → zygote   {"op": "warm", "code"}   {"op": "environment", "changes"}   {"op": "memory", "memory_mb"}
                     {"op": "fork", "figures"} or {"op": "become", "figures"}, each with three descriptors
    zygote → agent   {"event": "warmed", "error"}   {"event": "forked", "pid"}
"""

import gc
import json
import os
import socket
import sys
import traceback
import warnings
from typing import Any, NoReturn

from guest.agent.user import User
from guest.environment import apply
from guest.languages import Kernel, kernel, language
from guest.prctl import set_dumpable, set_no_new_privs

SOCKET_FD = 3
MAX_PACKET = 192 * 1024  # bytes; below the kernel's default socket buffer


class Zygote:
    """Carries out the agent's orders, one after the other."""

    def __init__(self, control: socket.socket, user: User, kernel: Kernel, *, in_process: bool) -> None:
        self._control = control
        self._user = user
        self._kernel = kernel
        self._in_process = in_process  # the kernel runs code in its own process

    def serve(self) -> None:
        """Serve until the agent is gone, or until this process becomes a kernel."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET, 3)
            if not data:
                return
            order = json.loads(data)
            if order["op"] == "warm":
                self._report(event="warmed", error=self._warm(order["code"]))
            elif order["op"] == "environment":
                apply(os.environ, order["changes"])
            elif order["op"] == "memory":
                self._user.memory_mb = order["memory_mb"]
            elif order["op"] == "fork":
                self._fork(order["figures"], fds)
            else:
                self._become_kernel(order["figures"], fds)

    def _report(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        self._control.send(json.dumps(message).encode())

    def _warm(self, code: str) -> str | None:
        """Run a template's warm-up code; every kernel starts with its imports."""
        try:
            self._kernel.warm(code)
        except BaseException:  # whatever it is, the template's author has to see it
            return f"the warm-up code failed:\n{traceback.format_exc()[-8000:]}"
        finally:
            gc.collect()
            gc.freeze()  # pages that the collector does not touch stay shared with the children
        return None

    def _fork(self, figures: int, fds: list[int]) -> None:
        """Fork a kernel that is orphaned at once, so that the agent adopts and reaps it.

        Its parent reports its pid before leaving it, so the agent knows the process before it has to reap it.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's idle threads do not survive a fork, which is fine
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
            self._user.drop_privileges(addresses=self._in_process)
            control, stdout, stderr = fds
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            self._kernel.serve(control, figures)
            status = 0
        except BaseException:  # this process ends here; the agent reads its stderr
            traceback.print_exc()
        finally:
            os._exit(status)


def main() -> None:
    """Prepare the language's kernel, then serve."""
    user = User(*json.loads(sys.argv[1]))
    set_no_new_privs()  # before libraries start threads, which inherit it
    if user.shares_id:
        set_dumpable(dumpable=False)
    name = sys.argv[2]
    made = kernel(name)
    made.prepare()
    Zygote(socket.socket(fileno=SOCKET_FD), user, made, in_process=language(name).in_process).serve()


if __name__ == "__main__":
    main()
