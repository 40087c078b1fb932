"""Where kernels come from: a zygote, warmed up once, forks them or, with `one_kernel`, becomes the only one.

On Linux forks share memory, so a warm zygote costs little and a new kernel takes milliseconds. In gVisor a fork copies
its memory, so a zygote would double that of a machine; there each kernel is warmed up separately.
"""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH120

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import guest
from guest.agent.children import Children
from guest.agent.launch import NOT_STARTED
from guest.agent.loop import Loop
from guest.agent.python_check import START, python_for
from guest.agent.user import User
from guest.environment import Changes
from guest.processes import signal_all

CODE_PATH = os.path.dirname(guest.__path__[0])
ZYGOTE_FD = 3
MAX_PACKET = 64 * 1024  # bytes of one message of the zygote
MAX_PID = 2**22  # of Linux; a signal to a negative one would reach a whole group
MAX_WARM_UP = 128 * 1024  # bytes of code as JSON; a zygote takes packets of 192 KiB


class Ordered(NamedTuple):
    """The callbacks for an ordered kernel: when it has started, and when it has ended."""

    started: Callable[[int], None]
    ended: Callable[[int], None]


class KernelSource:
    """At most one zygote, started when it is needed."""

    def __init__(self, loop: Loop, user: User, children: Children, *, one_kernel: bool) -> None:
        self._loop = loop
        self._user = user
        self._one_kernel = one_kernel
        self.language = "python"
        self._children = children
        self._zygote: socket.socket | None = None
        self.zygote_pid = 0  # 0: there is none
        self._warm_up: str | None = None  # the code that every zygote runs first
        self.code_ran = False  # code of the sandbox's owner, who may have left modules that a zygote imports
        self._on_warmed: Callable[[str | None], None] | None = None
        self._ordered: Ordered | None = None

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run warm-up code in the zygote and in every later one; `done` gets its traceback, or None."""
        if len(json.dumps(code)) > MAX_WARM_UP:
            done(f"the warm-up code is longer than {MAX_WARM_UP // 1024} KiB")
            return
        self._warm_up, self._on_warmed = code, done
        if self._zygote is None:
            self._start_zygote()
        else:
            self._order({"op": "warm", "code": code})

    def prepare(self) -> None:
        """Start a zygote if there is none. Raises OSError."""
        if self._zygote is None:
            self._start_zygote()

    def start_kernel(
        self, figures: int, fds: tuple[int, ...], started: Callable[[int], None], ended: Callable[[int], None]
    ) -> None:
        """Order a kernel from the zygote. `started` gets its pid, `ended` its status, even if it never started."""
        if not self._one_kernel:
            self._order({"op": "fork", "figures": figures}, fds)
            self._ordered = Ordered(started, ended)
            return
        self._order({"op": "become", "figures": figures}, fds)
        self._children.watch(self.zygote_pid, ended)
        started(self.zygote_pid)
        self._zygote, self.zygote_pid = None, 0

    def change_environment(self, changes: Changes) -> None:
        """Change the environment of the zygote, if there is one. The next one inherits the agent's."""
        if self._zygote is not None:
            self._order({"op": "environment", "changes": dict(changes)})

    def resize(self) -> None:
        """Tell the zygote, if there is one, how much memory the machine has now."""
        if self._zygote is not None:
            self._order({"op": "memory", "memory_mb": self._user.memory_mb})

    def settle(self) -> None:
        """Take in what the zygote has reported: it does so before a kernel that it forked becomes the agent's child."""
        if self._zygote is not None and self._zygote.fileno() >= 0:
            self._receive(self._zygote, 0)

    # ------------------------------------------------------------ the zygote

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python = python_for(self.language)
        # A zygote has the agent's privileges, so that code cannot touch it. One that is started after code has run may
        # import what code has left in its directories: it has the privileges of code.
        demoted = self.code_ran and self._user.uid is not None
        user = self._user.as_code() if demoted else self._user
        arguments = [*python, "-B", "-c", START, CODE_PATH, json.dumps(user.fields()), self.language]
        self.zygote_pid = os.fork()
        if self.zygote_pid == 0:
            self._exec_zygote(theirs.fileno(), arguments, demoted=demoted)
        self._children.watch(self.zygote_pid, self._zygote_ended)
        theirs.close()
        ours.setblocking(False)
        self._zygote = ours
        self._loop.add(ours.fileno(), partial(self._receive, ours))
        if self._warm_up is not None:
            self._order({"op": "warm", "code": self._warm_up})

    def _exec_zygote(self, control: int, arguments: list[str], *, demoted: bool) -> NoReturn:
        """Turn this child of the agent into the zygote."""
        try:
            os.dup2(control, ZYGOTE_FD)
            os.set_inheritable(ZYGOTE_FD, True)  # dup2 does not do so if the descriptor was there already
            os.dup2(2, 1)
            if demoted:
                self._user.drop_ids()
            os.execve(arguments[0], arguments, os.environ)  # noqa: S606 - no shell
        finally:
            os._exit(NOT_STARTED)

    def _order(self, order: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        assert self._zygote is not None
        with suppress(OSError):  # it has ended, and `Children` reports that next
            socket.send_fds(self._zygote, [json.dumps(order).encode()], fds)

    def _receive(self, zygote: socket.socket, _events: int) -> None:
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
            try:
                self._handle(json.loads(data))
            except (ValueError, TypeError, KeyError, RecursionError):  # code that it imported has written this
                signal_all([self.zygote_pid] if self.zygote_pid else [], signal.SIGKILL)

    def _handle(self, message: dict[str, Any]) -> None:
        if message["event"] == "warmed":
            self._warmed(message["error"] and str(message["error"])[:MAX_PACKET])
        elif self._ordered:
            pid = message["pid"]
            if type(pid) is not int or not 1 < pid < MAX_PID or pid == os.getpid():
                raise ValueError("not a kernel")
            ordered, self._ordered = self._ordered, None
            self._children.watch(pid, ordered.ended)
            ordered.started(pid)

    def _zygote_ended(self, status: int) -> None:
        """Handle the end of the zygote. A kernel that it has forked lives on; one that was only ordered is lost."""
        self._zygote, self.zygote_pid = None, 0
        self._warmed("the process that runs code ended; the machine's console says why")
        if self._ordered:
            ordered, self._ordered = self._ordered, None
            ordered.ended(status)

    def _warmed(self, error: str | None) -> None:
        if self._on_warmed:
            done, self._on_warmed = self._on_warmed, None
            done(error)
