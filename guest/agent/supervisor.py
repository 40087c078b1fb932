"""Keeps a kernel at hand and runs code in it, one run at a time; replaces it when it dies."""

import fcntl
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from guest.agent.artifacts import Watch
from guest.agent.children import Children
from guest.agent.execution import Execution
from guest.agent.loop import Link, Loop
from guest.agent.nursery import Nursery
from guest.agent.service import Service
from guest.agent.user import User
from guest.errors import ProtocolError, RequestRefused
from guest.protocol import Frame

FIONREAD = 0x541B  # ioctl: how many bytes wait in a pipe
PIPE_BYTES = 64 * 1024  # read at once; also how much output between two runs is kept for the next
TURN_BYTES = 1024 * 1024  # read of one pipe before the others have a turn
DRAIN_BYTES = 64 * 1024 * 1024  # read at the end of a run; only a process the run left behind writes more
REST_S = 0.005  # after a short piece of output: many small writes become few frames
MAX_UNREAD = 64 * 1024  # bytes of acknowledgements; a kernel waits for each before it asks for the next
HIGH_WATER = 1024 * 1024  # unsent bytes to the host above which no more output is read
MAX_FIGURES = 10**9  # a higher number is none the kernel gave
MAX_STILLBORN = 3  # kernels started in a row for nothing
LOST_GRACE_S = 1.0  # for a kernel to end after it closed its socket

Send = Callable[[dict[str, Any], bytes], None]


class Kernel:
    """The agent's end of a kernel process."""

    def __init__(self, link: Link, pipes: dict[str, int]) -> None:
        self.link = link
        self.pipes = pipes
        self.pid = 0  # until it is born
        self.early: dict[str, bytes] = {"stdout": b"", "stderr": b""}  # output while no run is on
        self.resting: set[str] = set()
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
        self._nursery = Nursery(loop, children, user, one_kernel=one_kernel)
        self._service = service
        self._kernel: Kernel | None = None
        self._run: Execution | None = None
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

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run warm-up code where kernels come from; `done` gets its traceback, or None."""
        self._nursery.warm(code, done)

    def run(self, header: dict[str, Any], code: bytes, send: Send, *, counted: bool = True) -> None:
        """Start a run. Its events and its end go through `send`. Raises RequestRefused."""
        if self._run is not None:
            raise RequestRefused("busy", "another run is on in this sandbox; wait for it or stop it")
        kernel = self._kernel or self._start_kernel()
        self._runs += counted
        self._run = Execution(header, code, self._runs if counted else 0, self._user, send)
        if kernel.ready:
            self._begin(kernel, self._run)

    def stop(self, request: int) -> None:
        """Interrupt a run, then kill it when its grace is over. Nothing happens if it has ended."""
        run = self._run
        if run is None or run.request != request or run.stopped:
            return
        run.stopped = True
        if not run.begun:
            self._finish(run.never_began(), b"")
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
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        control = ours.detach()
        link = Link(self._loop, (control, control), self._hear_kernel, self._kernel_hung_up)
        kernel = self._kernel = Kernel(link, {"stdout": out_read, "stderr": err_read})
        for stream, fd in kernel.pipes.items():
            os.set_blocking(fd, False)
            self._loop.add(fd, partial(self._read_pipe, kernel, stream))

        def born(pid: int) -> None:
            kernel.pid = pid

        self._nursery.bear(self._figures, (theirs.fileno(), out_write, err_write), born, self._lose_kernel)
        theirs.close()
        os.close(out_write)
        os.close(err_write)
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
        for stream, data in kernel.early.items():
            if data:
                run.feed(stream, data)
                kernel.early[stream] = b""

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
            self._drain(kernel)
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
                self._finish(run.ended(header), body)

    def _lose_kernel(self, status: int) -> None:
        """The kernel is gone, by whatever means. Its run ends, and a fresh kernel takes its place.

        Not for ever, if none comes to life: then a run that waits for one is refused, and the next tries once more.
        """
        kernel, run = self._kernel, self._run
        assert kernel is not None
        self._drain(kernel)
        for fd in kernel.pipes.values():
            self._loop.remove(fd)
            os.close(fd)
        kernel.link.close()
        self._kernel = None
        self._swept = False
        self._reseeded()
        self._stillborn += not kernel.ready
        if run and run.begun:
            self._finish(run.died(status), b"")
        if self._stillborn < MAX_STILLBORN:
            self._loop.soon(self._replace_kernel)  # the caller has its answer first
        elif run and not run.begun:
            self._run = None
            run.refuse("no_kernel", f"the process that runs code ended at its start ({run.died(status)})")

    def _replace_kernel(self) -> None:
        if self._kernel is None:
            self._start_kernel()

    def _finish(self, result: dict[str, Any], trace: bytes) -> None:
        run, self._run = self._run, None
        assert run is not None
        changed = self.watch.changes()
        if not self.watch.complete:
            result["artifacts_complete"] = False
        if self._service.loss is not None:
            result["service_loss"] = self._service.loss
        run.finish(result, trace, changed)

    # ------------------------------------------------------------ output

    def _read_pipe(self, kernel: Kernel, stream: str, _events: int = 0) -> None:
        """Read what the code wrote. Not while the host is slow to take it, nor piece by tiny piece."""
        if self._kernel is not kernel or stream in kernel.resting or self._channel.unsent > HIGH_WATER:
            return
        size = self._read_until(kernel, stream, TURN_BYTES)
        if size >= TURN_BYTES:
            self._loop.soon(lambda: self._read_pipe(kernel, stream))
        elif size:
            kernel.resting.add(stream)

            def wake() -> None:
                kernel.resting.discard(stream)
                self._read_pipe(kernel, stream)

            self._loop.later(REST_S, wake)

    def _resume(self) -> None:
        if self._kernel:
            for stream in self._kernel.pipes:
                self._read_pipe(self._kernel, stream)

    def _drain(self, kernel: Kernel) -> None:
        """Read all that was written so far, so that what comes next comes after it."""
        for stream, fd in kernel.pipes.items():
            if any(fcntl.ioctl(fd, FIONREAD, b"\0\0\0\0")):  # reading an empty pipe would raise an exception
                self._read_until(kernel, stream, DRAIN_BYTES)

    def _read_until(self, kernel: Kernel, stream: str, limit: int) -> int:
        fd = kernel.pipes[stream]
        size = 0
        while size < limit:
            try:
                data = os.read(fd, PIPE_BYTES)
            except BlockingIOError:
                break
            if not data:
                break
            size += len(data)
            if self._run:
                self._run.feed(stream, data)
            else:
                kernel.early[stream] = (kernel.early[stream] + data)[-PIPE_BYTES:]
            if len(data) < PIPE_BYTES:
                break
        return size
