"""Keeps a kernel at hand and runs code in it, one run at a time; replaces it when it dies."""

import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from guest.agent.artifacts import Watch
from guest.agent.execution import Execution
from guest.agent.loop import Link, Loop
from guest.agent.user import User
from guest.errors import ProtocolError, RequestRefused
from guest.protocol import Frame

ZYGOTE_FD = 3
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
        self.pid = 0  # until the zygote has forked it
        self.early: dict[str, bytes] = {"stdout": b"", "stderr": b""}  # output while no run is on
        self.resting: set[str] = set()
        self.ready = False  # it came to life and said so

    def signal(self, number: int) -> None:
        """Send a signal to the kernel and all of its process group."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


class Supervisor:
    """One zygote, at most one kernel, at most one run."""

    def __init__(self, loop: Loop, channel: Link, user: User) -> None:
        self._loop = loop
        self._channel = channel
        self._user = user
        self.watch = Watch()
        self._zygote: socket.socket | None = None
        self._zygote_pid = 0
        self._kernel: Kernel | None = None
        self._run: Execution | None = None
        self._figures = 0
        self._runs = 0
        self._stillborn = 0  # kernels in a row that ended before they were ready
        self._on_reseeded: Callable[[], None] | None = None
        self._on_warmed: Callable[[str | None], None] | None = None
        channel.on_drained = self._resume

    # ------------------------------------------------------------ what the agent asks for

    def run(self, header: dict[str, Any], code: bytes, send: Send, *, counted: bool = True) -> None:
        """Start a run. Its events and its end go through `send`. Raises RequestRefused."""
        if self._run is not None:
            raise RequestRefused("busy", "another run is on in this sandbox; wait for it or stop it")
        kernel = self._kernel or self._start_kernel(sweep=self._stillborn > 0)
        self._runs += counted
        number = self._runs if counted else 0
        self._run = run = Execution(header, number, self._user, send)
        kernel.link.send({"op": "run", "run": number, "max_display_bytes": run.max_display_bytes}, code)
        for stream, data in kernel.early.items():
            if data:
                run.feed(stream, data)
                kernel.early[stream] = b""

    def stop(self, request: int) -> None:
        """Interrupt a run, then kill it when its grace is over. Nothing happens if it has ended."""
        run = self._run
        if run is None or run.request != request or run.stopped:
            return
        run.stopped = True
        if self._kernel:
            self._kernel.signal(signal.SIGINT)
        self._loop.later(run.grace_s, lambda: self._kill(run))

    def reseed(self, done: Callable[[], None]) -> None:
        """Make the live kernel reseed its generators; `done` is called when it has, or when there is none."""
        if self._kernel is None:
            done()
            return
        self._on_reseeded = done
        self._kernel.link.send({"op": "reseed"})

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run warm-up code in the zygote; `done` gets its traceback, or None."""
        self._on_warmed = done
        self._order({"op": "warm", "code": code})

    # ------------------------------------------------------------ zygote

    def _order(self, order: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if self._zygote is None:
            self._start_zygote()
        assert self._zygote is not None
        socket.send_fds(self._zygote, [json.dumps(order).encode()], fds)

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = "none" if self._user.uid is None else f"{self._user.uid}:{self._user.gid}"
        actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), ZYGOTE_FD), (os.POSIX_SPAWN_DUP2, 2, 1)]
        arguments = [sys.executable, "-B", "-m", "guest.agent.zygote", name]
        self._zygote_pid = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=actions)
        theirs.close()
        ours.setblocking(False)
        self._zygote = ours
        self._loop.add(ours.fileno(), self._hear_zygote)

    def _hear_zygote(self, _events: int) -> None:
        while self._zygote is not None:
            try:
                data = self._zygote.recv(64 * 1024)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose_zygote()
                return
            message = json.loads(data)
            if message["event"] == "warmed":
                self._warmed(message["error"])
            elif message["event"] == "forked":
                self._forked(message["pid"])
            elif message["event"] == "exited" and self._kernel and self._kernel.pid == message["pid"]:
                self._lose_kernel(message["status"])

    def _lose_zygote(self) -> None:
        """Without its zygote a kernel's end would go unnoticed: it goes too, and the next run starts both anew."""
        assert self._zygote is not None
        self._loop.remove(self._zygote.fileno())
        self._zygote.close()
        self._zygote = None
        _, status = os.waitpid(self._zygote_pid, 0)
        self._warmed("the process that runs code ended; the machine's console says why")
        if self._kernel:
            self._kernel.signal(signal.SIGKILL)
            self._lose_kernel(status, restart=False)

    def _warmed(self, error: str | None) -> None:
        if self._on_warmed:
            done, self._on_warmed = self._on_warmed, None
            done(error)

    # ------------------------------------------------------------ kernel

    def _start_kernel(self, *, sweep: bool) -> Kernel:
        """Order a new kernel; it can be sent work at once."""
        ours, theirs = socket.socketpair()
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        fds = (theirs.fileno(), out_write, err_write)
        try:
            self._order({"op": "fork", "figures": self._figures, "sweep": sweep}, fds)
        finally:
            theirs.close()
            os.close(out_write)
            os.close(err_write)
        control = ours.detach()
        link = Link(self._loop, (control, control), self._hear_kernel, self._kernel_hung_up)
        kernel = self._kernel = Kernel(link, {"stdout": out_read, "stderr": err_read})
        for stream, fd in kernel.pipes.items():
            os.set_blocking(fd, False)
            self._loop.add(fd, partial(self._read_pipe, kernel, stream))
        return kernel

    def _forked(self, pid: int) -> None:
        if self._kernel:
            self._kernel.pid = pid
            if self._run and self._run.stopped:
                self._kernel.signal(signal.SIGINT)

    def _kill(self, run: Execution) -> None:
        """End the run by force, with all that it started: processes in groups of their own, too."""
        if self._run is run and self._kernel:
            self._kernel.signal(signal.SIGKILL)
            if self._zygote:
                self._order({"op": "sweep"})

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
        if event == "reseeded" and self._on_reseeded:
            done, self._on_reseeded = self._on_reseeded, None
            done()
            return
        self._drain(kernel)
        if header.get("wait") is True:
            kernel.link.send({"op": "ack"})
            if kernel.link.unsent > MAX_UNREAD:
                raise ProtocolError("the kernel does not read its acknowledgements")
        if self._run is None or header.get("run") != self._run.number:
            if event == "ready":
                kernel.ready, self._stillborn = True, 0
            return  # or from a thread that outlived its run
        if event == "display":
            self._run.display(header, frame.body)
        elif event == "done":
            figures = header.get("figures")
            self._figures = figures if type(figures) is int and 0 <= figures < MAX_FIGURES else self._figures
            self._finish(self._run.ended(header), frame.body)

    def _lose_kernel(self, status: int, *, restart: bool = True) -> None:
        """The kernel is gone, by whatever means. Its run ends, and a fresh kernel takes its place.

        Not for ever, if none comes to life: then the next run tries once more.
        """
        kernel = self._kernel
        assert kernel is not None
        self._drain(kernel)
        for fd in kernel.pipes.values():
            self._loop.remove(fd)
            os.close(fd)
        kernel.link.close()
        self._kernel = None
        if self._on_reseeded:
            done, self._on_reseeded = self._on_reseeded, None
            done()
        self._stillborn += not kernel.ready
        if restart and self._stillborn < MAX_STILLBORN:
            self._start_kernel(sweep=True)
        run = self._run
        if run and not kernel.ready and not run.stopped:
            self._run = None
            run.refuse("no_kernel", f"the process that runs code ended at its start ({run.died(status)})")
        elif run:
            self._finish(run.died(status), b"")

    def _finish(self, result: dict[str, Any], trace: bytes) -> None:
        run, self._run = self._run, None
        assert run is not None
        changed = self.watch.changes()
        if not self.watch.complete:
            result["artifacts_complete"] = False
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
