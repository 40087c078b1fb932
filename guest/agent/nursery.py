"""Where kernels come from: a process warmed up once that forks them or, with `one_kernel`, turns into the one there is.

Forks share their memory on Linux, so a warm process kept aside costs little and gives a new kernel in milliseconds.
Where forks copy (gVisor) it would double the memory of a machine; there each kernel is warmed up for itself.
"""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH120

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import guest
from guest.agent.birth import START, python_for
from guest.agent.children import Children
from guest.agent.loop import Loop
from guest.agent.sweep import sweep
from guest.agent.user import User

PLACE = os.path.dirname(guest.__path__[0])  # where our own code is
ZYGOTE_FD = 3
MAX_PACKET = 64 * 1024  # bytes of what a zygote says at once


class Expected(NamedTuple):
    """Who waits for a kernel, and for its end."""

    born: Callable[[int], None]
    ended: Callable[[int], None]


class Nursery:
    """At most one zygote, started when it is needed."""

    def __init__(self, loop: Loop, user: User, children: Children, *, one_kernel: bool) -> None:
        self._loop = loop
        self._user = user
        self._one_kernel = one_kernel
        self.language = "python"
        self._children = children
        self._zygote: socket.socket | None = None
        self._pid = 0  # of the zygote
        self._warm_up: str | None = None  # the code that every zygote runs first
        self._on_warmed: Callable[[str | None], None] | None = None
        self._expected: Expected | None = None

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run warm-up code in the zygote, and in every later one; `done` gets its traceback, or None."""
        self._warm_up, self._on_warmed = code, done
        if self._zygote is None:
            self._start()
        else:
            self._order({"op": "warm", "code": code})

    def bear(
        self, figures: int, fds: tuple[int, ...], born: Callable[[int], None], ended: Callable[[int], None]
    ) -> None:
        """Order a kernel. `born` gets its process id, `ended` its status, even if it was never born."""
        if self._zygote is None:
            self._start()
        if not self._one_kernel:
            self._order({"op": "fork", "figures": figures}, fds)
            self._expected = Expected(born, ended)
            return
        self._order({"op": "become", "figures": figures}, fds)
        self._children.watch(self._pid, ended)
        born(self._pid)
        self._zygote, self._pid = None, 0

    def sweep(self, service: int) -> None:
        """End all that kernels have left behind, but not the process `service` and those below it."""
        sweep(self._user, self._children, {self._pid} if self._pid else set(), service)

    # ------------------------------------------------------------ the zygote

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), ZYGOTE_FD), (os.POSIX_SPAWN_DUP2, 2, 1)]
        python = python_for(self.language)
        arguments = [*python, "-B", "-c", START, PLACE, json.dumps(self._user), self.language]
        self._pid = os.posix_spawn(python[0], arguments, os.environ, file_actions=actions)
        self._children.watch(self._pid, self._lose)
        theirs.close()
        ours.setblocking(False)
        self._zygote = ours
        self._loop.add(ours.fileno(), partial(self._hear, ours))
        if self._warm_up is not None:
            self._order({"op": "warm", "code": self._warm_up})

    def _order(self, order: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        assert self._zygote is not None
        with suppress(OSError):  # it has ended, and the agent is about to hear of it
            socket.send_fds(self._zygote, [json.dumps(order).encode()], fds)

    def _hear(self, zygote: socket.socket, _events: int) -> None:
        while True:
            try:
                data = zygote.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove(zygote.fileno())
                zygote.close()
                return
            message = json.loads(data)
            if message["event"] == "warmed":
                self._warmed(message["error"])
            elif self._expected:
                expected, self._expected = self._expected, None
                self._children.watch(message["pid"], expected.ended)
                expected.born(message["pid"])

    def _lose(self, status: int) -> None:
        """The zygote ended. A kernel it has forked lives on; one that was still to come does not come."""
        self._zygote, self._pid = None, 0
        self._warmed("the process that runs code ended; the machine's console says why")
        if self._expected:
            expected, self._expected = self._expected, None
            expected.ended(status)

    def _warmed(self, error: str | None) -> None:
        if self._on_warmed:
            done, self._on_warmed = self._on_warmed, None
            done(error)
