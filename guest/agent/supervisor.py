"""Keeps a kernel at hand and runs code in it, or a command beside it, one run at a time; replaces it when it dies."""

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from guest.agent.artifacts import Watch
from guest.agent.children import Children
from guest.agent.commands import Commands
from guest.agent.execution import Execution
from guest.agent.languages import MEMORY_WATCHERS
from guest.agent.loop import Link, Loop
from guest.agent.nursery import Nursery
from guest.agent.service import Service
from guest.agent.streams import Streams
from guest.agent.user import User
from guest.errors import ProtocolError, RequestRefused
from guest.protocol import Frame

MAX_UNREAD = 64 * 1024  # bytes of acknowledgements; a kernel waits for each before it asks for the next
MAX_FIGURES = 10**9  # a higher number is none the kernel gave
MAX_STILLBORN = 3  # kernels started in a row for nothing
LOST_GRACE_S = 1.0  # for a kernel to end after it closed its socket

SHELL = "shell"  # the language without a kernel: its code is a command

Send = Callable[[dict[str, Any], bytes], None]


class Kernel:
    """The agent's end of a kernel process."""

    def __init__(self, link: Link, streams: Streams) -> None:
        self.link = link
        self.streams = streams
        self.pid = 0  # until it is born
        self.ready = False  # it came to life and said so
        self.drained = 0  # the read of the link that all output so far was drained for

    def signal(self, number: int) -> None:
        """Send a signal to the kernel and all of its process group."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


class Supervisor:
    """At most one kernel, at most one run."""

    def __init__(
        self, loop: Loop, channel: Link, user: User, children: Children, service: Service, *, one_kernel: bool
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._user = user
        self.watch = Watch()
        self._nursery = Nursery(loop, user, children, one_kernel=one_kernel)
        self._commands = Commands(loop, channel, user, children)
        self._service = service
        self._kernel: Kernel | None = None
        self._run: Execution | None = None  # in the kernel
        self._figures = 0
        self._runs = 0
        self._stillborn = 0  # kernels in a row that ended before they were ready
        self._swept = True  # nothing is left of earlier kernels
        self._on_reseeded: Callable[[], None] | None = None
        channel.on_drained = self._resume

    # ------------------------------------------------------------ what the agent asks for

    @property
    def language(self) -> str:
        """What kernels run."""
        return self._nursery.language

    @language.setter
    def language(self, name: str) -> None:
        self._nursery.language = name
        self._commands.reserving = name in MEMORY_WATCHERS

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run warm-up code where kernels come from; `done` gets its traceback, or None."""
        if self.language == SHELL:
            self._commands.warm(code, done)
        else:
            self._nursery.warm(code, done)

    def run(self, header: dict[str, Any], code: bytes, send: Send, *, counted: bool = True) -> None:
        """Start a run. Its events and its end go through `send`. Raises RequestRefused."""
        if self._run or self._commands.run:
            raise RequestRefused("busy", "another run is on in this sandbox; wait for it or stop it")
        run = Execution(header, code, self._runs + 1 if counted else 0, self._user, send)
        if run.kind == "command" or self.language == SHELL:
            self._commands.start(run, self._command_ended)
        else:
            self._run = run
            kernel = self._kernel or self._start_kernel()
            if kernel.ready:
                self._begin(kernel, run)
        self._runs += counted

    def stop(self, request: int) -> None:
        """Interrupt a run, then kill it when its grace is over. Nothing happens if it has ended."""
        run = self._run or self._commands.run
        if run is None or run.request != request or run.stopped:
            return
        run.stopped = True
        if run is self._commands.run:
            self._commands.stop()
        elif not run.begun:
            self._finish(run, run.never_began())
        elif self._kernel:
            self._kernel.signal(signal.SIGINT)
            self._loop.later(run.grace_s, lambda: self._kill(run))

    def reseed(self, done: Callable[[], None]) -> None:
        """Make the live kernel reseed its generators; `done` is called when it has, or when there is none."""
        if self._kernel is None:
            done()
            return
        self._on_reseeded = done
        self._kernel.link.send({"op": "reseed"})

    # ------------------------------------------------------------ kernel

    def _start_kernel(self) -> Kernel:
        """Order a new kernel, where nothing of the last one is left."""
        if not self._swept:
            self._nursery.sweep(self._service.pid)
            self._swept = True
        ours, theirs = socket.socketpair()
        control = ours.detach()
        link = Link(self._loop, (control, control), self._hear_kernel, self._kernel_hung_up)
        streams = Streams(self._loop, self._channel, self._user)
        kernel = self._kernel = Kernel(link, streams)

        def born(pid: int) -> None:
            kernel.pid = pid

        self._nursery.bear(self._figures, (theirs.fileno(), *streams.writers), born, self._lose_kernel)
        theirs.close()
        streams.close_writers()
        return kernel

    def _kernel_ready(self, kernel: Kernel) -> None:
        kernel.ready, self._stillborn = True, 0
        if self._run:
            self._begin(kernel, self._run)

    def _reseeded(self) -> None:
        if self._on_reseeded:
            done, self._on_reseeded = self._on_reseeded, None
            done()

    def _begin(self, kernel: Kernel, run: Execution) -> None:
        run.begun = True
        kernel.link.send(run.order(), run.code)
        kernel.streams.begin(run)

    def _kill(self, run: Execution) -> None:
        """End the run by force. What it started goes with the sweep before the next kernel."""
        if self._run is run and self._kernel:
            self._kernel.signal(signal.SIGKILL)

    def _kernel_hung_up(self) -> None:
        """The kernel's socket closed. It is ending, or the code closed it: either way it is of no more use."""
        kernel = self._kernel

        def insist() -> None:
            if kernel is not None and self._kernel is kernel:
                kernel.signal(signal.SIGKILL)

        self._loop.later(LOST_GRACE_S, insist)

    def _hear_kernel(self, frame: Frame) -> None:
        """A message from the kernel, which the user's code could have written: trust nothing in it."""
        kernel, header = self._kernel, frame.header
        if kernel is None:
            return
        event = header.get("event")
        if event == "reseeded":
            self._reseeded()
            return
        if kernel.drained != kernel.link.reads:  # what was sent at once comes after the same output
            kernel.drained = kernel.link.reads
            kernel.streams.drain()
        if header.get("wait") is True:
            kernel.link.send({"op": "ack"})
            if kernel.link.unsent > MAX_UNREAD:
                raise ProtocolError("the kernel does not read its acknowledgements")
        if event == "ready" and not kernel.ready:
            self._kernel_ready(kernel)
        elif self._run is None or header.get("run") != self._run.number:
            return  # from a thread that outlived its run
        else:
            self._hear_of_run(self._run, frame)

    def _hear_of_run(self, run: Execution, frame: Frame) -> None:
        header, body = frame
        match header.get("event"):
            case "display":
                run.display(header, body)
            case "report":
                run.report(body)
            case "done":
                figures = header.get("figures")
                self._figures = figures if type(figures) is int and 0 <= figures < MAX_FIGURES else self._figures
                self._finish(run, run.ended(header), body)

    def _lose_kernel(self, status: int) -> None:
        """The kernel is gone, by whatever means. Its run ends, and a fresh kernel takes its place.

        Not for ever, if none comes to life: then a run that waits for one is refused, and the next tries once more.
        """
        kernel, run = self._kernel, self._run
        assert kernel is not None
        kernel.streams.drain()
        kernel.streams.close()
        kernel.link.close()
        self._kernel = None
        self._swept = False
        self._reseeded()
        self._stillborn += not kernel.ready
        if self._commands.run:
            self._commands.run.kernel_lost = True
        if run and run.begun:
            self._finish(run, run.died(status))
        if self._stillborn < MAX_STILLBORN:
            self._loop.soon(self._replace_kernel)  # the caller has its answer first
        elif run and not run.begun:
            self._run = None
            run.refuse("no_kernel", f"the process that runs code ended at its start ({run.died(status)})")

    def _replace_kernel(self) -> None:
        """Not while a command is on: what is swept away before a kernel starts would be that, too."""
        if self._kernel is None and not self._commands.run:
            self._start_kernel()

    def _command_ended(self, run: Execution, result: dict[str, Any]) -> None:
        self._finish(run, result)
        if run.kernel_lost:
            self._loop.soon(self._replace_kernel)

    def _finish(self, run: Execution, result: dict[str, Any], trace: bytes = b"") -> None:
        self._run = None
        if self._kernel:
            self._kernel.streams.end()
        changed = self.watch.changes()
        if not self.watch.complete:
            result["artifacts_complete"] = False
        if self._service.loss is not None:
            result["service_loss"] = self._service.loss
        run.finish(result, trace, changed)

    def _resume(self) -> None:
        self._commands.streams.resume()
        if self._kernel:
            self._kernel.streams.resume()
