"""The process that has everything imported and forks kernels: a new one is there in milliseconds.

The agent starts it as `python -m guest.agent.zygote UID:GID` with a socket on descriptor 3. It keeps root's rights, so
the code it lets loose in its children cannot touch it. Messages are JSON, one a packet:

    agent → zygote   {"op": "warm", "code"}   {"op": "fork", "figures", "sweep"} with three descriptors
                     {"op": "sweep"}
    zygote → agent   {"event": "warmed", "error"}   {"event": "forked", "pid"}   {"event": "exited", "pid", "status"}
"""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH123

import gc
import json
import os
import resource
import signal
import socket
import sys
import traceback
import warnings
from typing import Any

from guest.agent.user import User, parse_user
from guest.kernels import python as kernel

SOCKET_FD = 3
MAX_PROCESSES = 160  # and threads, of the sandbox's user; a fork costs 1.4 MB, a small machine has 350 MB to spare
MAX_PACKET = 192 * 1024  # bytes; below the kernel's default socket buffer


class Zygote:
    """Serves the agent's orders, one after the other."""

    def __init__(self, control: socket.socket, user: User) -> None:
        self._control = control
        self._user = user
        self._children: set[int] = set()

    def serve(self) -> None:
        """Work until the agent is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET, 3)
            if not data:
                return
            order = json.loads(data)
            if order["op"] == "warm":
                self._report(event="warmed", error=self._warm(order["code"]))
            elif order["op"] == "sweep":
                self._sweep()
            else:
                self._fork(order, fds)

    def _report(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        self._control.send(json.dumps(message).encode())

    def _warm(self, code: str) -> str | None:
        """Run a template's warm-up code; its imports are what every kernel starts with."""
        try:
            kernel.warm(code)
        except BaseException:  # whatever it is, the builder of the template has to see it
            return traceback.format_exc()[-8000:]
        finally:
            gc.collect()
            gc.freeze()  # children share these pages for longer when the collector leaves them alone
        return None

    def _fork(self, order: dict[str, Any], fds: list[int]) -> None:
        if order["sweep"]:
            self._sweep()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's idle threads do not survive a fork and need not
            pid = os.fork()
        if pid == 0:
            self._become_kernel(order, fds)
        for fd in fds:
            os.close(fd)
        self._children.add(pid)
        self._report(event="forked", pid=pid)
        self._reap()  # it may have ended before it was in the set

    def _become_kernel(self, order: dict[str, Any], fds: list[int]) -> None:
        status = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.setsid()
            _allow_oom_kill()
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # the agent is above all that code can start
            if self._user.uid is not None:  # else the limit would count all that this host's user runs
                resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
            self._user.become()
            control, stdout, stderr = fds
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            kernel.serve(control, order["figures"])
            status = 0
        except BaseException:  # the process ends here; its stderr reaches the agent
            traceback.print_exc()
        finally:
            os._exit(status)

    def _sweep(self) -> None:
        """Kill the kernel and all that it has left behind: everything the sandbox's user runs."""
        if self._user.uid is None:
            return
        pid = os.fork()
        if pid == 0:
            try:
                self._user.sweep()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    def _reap(self) -> None:
        for pid in tuple(self._children):
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # the signal came in between, and its handler was faster
                continue
            if found:
                self._children.discard(pid)
                self._report(event="exited", pid=pid, status=status)


def _allow_oom_kill() -> None:
    """When memory runs out the code goes, not the agent."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        pass


def main() -> None:
    """Get ready, then serve."""
    user = parse_user(sys.argv[1])
    kernel.prepare()
    Zygote(socket.socket(fileno=SOCKET_FD), user).serve()


if __name__ == "__main__":
    main()
