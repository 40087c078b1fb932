"""The process that a template starts before its snapshot and that is alive in every clone, such as a database.

It has the privileges and limits of code, but outlives runs and kernels. The agent keeps only the end of its output. A
service that ends is not started again, because its state is lost; every later result reports that.
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
from guest.processes import signal_name

READY_PAUSE_S = 0.05  # between two tries of ready_cmd
OOM_SCORE = 400  # if memory runs out, the kernel kills code first, which has 500
SHOWN_CHARS = 1500  # of the output of a failed start; two of them fit into an error
LOSS_CHARS = 400  # of the output of a lost service, which comes with every later result

Done = Callable[[str | None], None]


class Service:
    """At most one service, started once."""

    def __init__(self, loop: Loop, children: Children, user: User) -> None:
        self._loop = loop
        self._children = children
        self._user = user
        self._order: dict[str, Any] = {}
        self._on_ready: Done | None = None
        self._output: Tail
        self._check_output: Tail
        self._check = 0  # the pid of ready_cmd
        self.pid = 0  # 0: there is none
        self.loss: str | None = None  # how it ended after it had been ready

    def start(self, order: dict[str, Any], done: Done) -> None:
        """Start the service; `done` gets None as soon as it is ready, or the reason why it is not."""
        self._order, self._on_ready = order, done
        self._output, self._check_output = Tail(self._loop), Tail(self._loop)
        self.pid = self._launch(order["command"], self._output)
        self._output.close_writer()
        self._children.watch(self.pid, self._ended)
        self._loop.later(float(order["ready_timeout_s"]), self._give_up)
        self._try()

    def _launch(self, command: list[str], tail: Tail) -> int:
        order = self._order
        return launch(self._user, command, env=order["env"], cwd=order["cwd"], output=tail.writer, oom_score=OOM_SCORE)

    def _try(self) -> None:
        if self._on_ready:
            self._check_output.clear()
            try:
                self._check = self._launch(self._order["ready"], self._check_output)
            except OSError:  # no process can be started now
                self._loop.later(READY_PAUSE_S, self._try)
            else:
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
                f"ready_cmd did not succeed within {limit}: check that it tests what start_cmd starts, or raise "
                f"ready_timeout_s.\n{_quote('ready_cmd', self._check_output)}\n{_quote('start_cmd', self._output)}"
            )

    def _ended(self, status: int) -> None:
        self.pid = 0
        how = _describe(status)
        if self._on_ready:
            self._settle(
                f"start_cmd ended ({how}) before ready_cmd succeeded: it must stay in the foreground.\n"
                f"{_quote('start_cmd', self._output)}"
            )
        else:
            output = self._output.text(LOSS_CHARS)
            self.loss = f"{how}; its last output: {output}" if output else how

    def _settle(self, failure: str | None) -> None:
        assert self._on_ready is not None
        done, self._on_ready = self._on_ready, None
        for pid in (self._check, self.pid if failure else 0):
            if pid:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self._check_output.close_writer()
        done(failure)


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal_name(os.WTERMSIG(status))
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _quote(name: str, tail: Tail) -> str:
    output = tail.text(SHOWN_CHARS)
    return f"The last output of {name}:\n{output}" if output else f"{name} wrote nothing."
