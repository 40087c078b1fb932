"""The process a template starts before its snapshot and that is alive in every clone: a database, a notebook server.

It has the rights and limits of code, but is no run's: neither the end of a run nor that of a kernel ends it. What it
says goes nowhere but into the agent's memory, and of that only the end is kept. If it ends, it is not started again:
what it knew is gone, and whoever uses the sandbox is told so with every result.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from guest.agent.children import Children
from guest.agent.launch import Tail, launch
from guest.agent.loop import Loop
from guest.agent.user import User
from guest.programs import signal_name

READY_PAUSE_S = 0.05  # between the end of one try of ready_cmd and the next
OOM_SCORE = 400  # when memory runs out code goes first, which has 500
SHOWN_CHARS = 1500  # of what a process said last; two of them fit an error
LAST_WORDS_CHARS = 400  # of what a service said that ended in use: they come with every result

Done = Callable[[str | None], None]


class Service:
    """At most one, started once."""

    def __init__(self, loop: Loop, children: Children, user: User) -> None:
        self._loop = loop
        self._children = children
        self._user = user
        self._order: dict[str, Any] = {}
        self._on_ready: Done | None = None
        self._said: Tail
        self._check_said: Tail
        self._check = 0  # the process of ready_cmd
        self.pid = 0  # 0: there is none
        self.loss: str | None = None  # how it ended after it had been ready

    def start(self, order: dict[str, Any], done: Done) -> None:
        """Start the service; `done` gets None as soon as it is ready, or why it will not be."""
        self._order, self._on_ready = order, done
        self._said, self._check_said = Tail(self._loop), Tail(self._loop)
        self.pid = self._launch(order["command"], self._said)
        self._said.leave_to_programs()
        self._children.watch(self.pid, self._ended)
        self._loop.later(float(order["ready_timeout_s"]), self._give_up)
        self._try()

    def _launch(self, command: list[str], tail: Tail) -> int:
        order = self._order
        return launch(self._user, command, env=order["env"], cwd=order["cwd"], output=tail.writer, oom_score=OOM_SCORE)

    def _try(self) -> None:
        if self._on_ready:
            self._check_said.forget()
            self._check = self._launch(self._order["ready"], self._check_said)
            self._children.watch(self._check, self._checked)

    def _checked(self, status: int) -> None:
        self._check = 0
        if not self._on_ready:
            return
        if status == 0:
            self._settle(None)
        else:
            self._loop.later(READY_PAUSE_S, self._try)

    def _give_up(self) -> None:
        if self._on_ready:
            limit = f"{float(self._order['ready_timeout_s']):g} s"
            self._settle(
                f"ready_cmd did not succeed within {limit}: see that it asks for what start_cmd serves, or raise "
                f"ready_timeout_s.\n{_quote('ready_cmd', self._check_said)}\n{_quote('start_cmd', self._said)}"
            )

    def _ended(self, status: int) -> None:
        self.pid = 0
        how = _how(status)
        if self._on_ready:
            self._settle(
                f"start_cmd ended ({how}) before ready_cmd succeeded: it has to stay in the foreground.\n"
                f"{_quote('start_cmd', self._said)}"
            )
        else:
            words = self._said.text(LAST_WORDS_CHARS)
            self.loss = f"{how}; it said last: {words}" if words else how

    def _settle(self, failure: str | None) -> None:
        assert self._on_ready is not None
        done, self._on_ready = self._on_ready, None
        for pid in (self._check, self.pid if failure else 0):
            if pid:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self._check_said.leave_to_programs()
        done(failure)


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal_name(os.WTERMSIG(status))
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _quote(name: str, tail: Tail) -> str:
    words = tail.text(SHOWN_CHARS)
    return f"{name} said last:\n{words}" if words else f"{name} said nothing."
