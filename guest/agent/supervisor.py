"""Keeps a kernel running and runs code in it, or a command beside it, one at a time; replaces it when it dies."""

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from guest.agent.artifacts import ArtifactWatch
from guest.agent.children import Children
from guest.agent.execution import Execution
from guest.agent.kernel_source import KernelSource
from guest.agent.languages import MEMORY_WATCHERS
from guest.agent.loop import Link, Loop
from guest.agent.memory_watch import MemoryWatch
from guest.agent.process_list import ProcessList
from guest.agent.service import Service
from guest.agent.shell import Shell
from guest.agent.streams import Streams
from guest.agent.sweep import RunProcesses, sweep
from guest.agent.terminals import Terminals
from guest.agent.user import User
from guest.environment import Changes, apply
from guest.errors import ProtocolError, RequestRefused
from guest.protocol import Frame

MAX_UNREAD = 64 * 1024  # bytes of acknowledgements; an honest kernel waits for each
MAX_FIGURES = 10**9  # no honest kernel reports more
MAX_FAILED_STARTS = 3  # of kernels in a row
HANG_UP_GRACE_S = 1.0  # for a kernel to end after it closed its socket
NONSENSE = b"mcp-sandbox: code wrote to the socket of the process that runs it; that process was ended.\n"

OVER_MEMORY = "the sandbox used more than its {} MB of memory; files count, too"
OTHERS_ENDED = "mcp-sandbox: {}. Processes that earlier runs had left running were ended.\n"

SHELL = "shell"  # the language without a kernel: code is a command

Send = Callable[[dict[str, Any], bytes], None]


class Kernel:
    """A kernel process as the agent sees it."""

    def __init__(self, link: Link, streams: Streams) -> None:
        self.link = link
        self.streams = streams
        self.pid = 0  # until it has started
        self.ready = False  # it can take code
        self.drained = 0  # the read of the link before which all output was drained

    def signal(self, number: int) -> None:
        """Send a signal to the kernel's process group."""
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
        self._children = children
        self.artifacts = ArtifactWatch()
        self._source = KernelSource(loop, user, children, one_kernel=one_kernel)
        self._listed = ProcessList(lambda: self._kernel_pid)
        self._shell = Shell(loop, channel, user, children, self._own_processes, self._listed)
        self.terminals = Terminals(loop, channel, user, children)
        self._service = service
        self._memory = MemoryWatch(loop, user, children, self._jobs, self._spared, self._over_memory)
        self._note = b""  # for the next run, about what happened before it
        self._kernel: Kernel | None = None
        self._run: Execution | None = None  # in the kernel
        self._processes: RunProcesses | None = None  # of that run
        self._figures = 0
        self._runs = 0
        self._failed_starts = 0  # kernels in a row that ended before they were ready
        self._swept = True  # earlier kernels have left no processes
        self._on_reseeded: Callable[[], None] | None = None
        channel.on_drained.append(self._resume)

    # ------------------------------------------------------------ requests

    @property
    def language(self) -> str:
        """The language of the kernels."""
        return self._source.language

    @language.setter
    def language(self, name: str) -> None:
        self._source.language = name
        self._shell.memory_watched = self.terminals.memory_watched = name in MEMORY_WATCHERS

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run warm-up code in the source of kernels; `done` gets its traceback, or None."""
        if self.language == SHELL:
            self._shell.warm(code, done)
        else:
            self._source.warm(code, done)

    def run(self, header: dict[str, Any], code: bytes, send: Send, *, counted: bool = True) -> None:
        """Start a run. `send` gets its events and its result. Raises RequestRefused."""
        if self._run or self._shell.run:
            raise RequestRefused("busy", "another run is active in this sandbox; wait for it or stop it")
        self._memory.start()
        run = Execution(header, code, self._runs + 1 if counted else 0, self._user, send)
        if self._note:
            run.feed("stderr", self._note)
            self._note = b""
        if run.kind == "command" or self.language == SHELL:
            self._shell.start(run, self._command_ended)
        else:
            self._run_in_kernel(run)
        self._runs += counted
        self._source.code_ran |= counted

    def open_terminal(self, header: dict[str, Any]) -> None:
        """Open a terminal beside the kernel. Raises RequestRefused."""
        self._memory.start()
        self.terminals.open(header)
        self._source.code_ran = True

    def _run_in_kernel(self, run: Execution) -> None:
        """Start a run in the kernel, or when there is one. Raises RequestRefused."""
        try:
            kernel = self._kernel or self._start_kernel()
        except OSError as error:
            raise RequestRefused("no_kernel", f"no process can be started: {error.strerror}") from error
        self._run = run
        if kernel.ready:
            self._begin(kernel, run)

    def stop(self, request: int) -> None:
        """Interrupt a run, and kill it when its grace period is over. Does nothing if it has ended."""
        run = self._run or self._shell.run
        if run is None or run.request != request or run.stopped:
            return
        run.stopped = True
        if run is self._shell.run:
            self._shell.stop()
        elif not run.begun:
            self._finish(run, run.never_began())
        elif self._kernel:
            self._kernel.signal(signal.SIGINT)
            self._loop.later(run.grace_s, lambda: self._kill(run))

    def reseed(self, done: Callable[[], None]) -> None:
        """Make the kernel reseed its generators; `done` is called when it has, or if there is none."""
        if self._kernel is None:
            done()
            return
        self._on_reseeded = done
        self._kernel.link.send({"op": "reseed"})

    def change_environment(self, changes: Changes) -> None:
        """Change the environment of all code that runs from now on, in the live kernel, too."""
        apply(os.environ, changes)
        self._source.change_environment(changes)
        self._shell.change_environment(changes)
        if self._kernel:
            self._kernel.link.send({"op": "environment", "changes": dict(changes)})

    # ------------------------------------------------------------ kernel

    def _start_kernel(self) -> Kernel:
        """Start a new kernel, after everything that the last one left has been ended. Raises OSError."""
        if not self._swept:
            sweep(self._user, self._children, self._own_processes())
            self._swept = True
        self._source.prepare()
        ours, theirs = socket.socketpair()
        control = ours.detach()
        link = Link(self._loop, (control, control), self._receive, self._kernel_hung_up, self._kernel_lost)
        streams = Streams(self._loop, self._channel, self._user)
        kernel = self._kernel = Kernel(link, streams)

        def started(pid: int) -> None:
            kernel.pid = pid

        fds = (theirs.fileno(), *streams.writers)
        self._source.start_kernel(self._figures, fds, started, self._kernel_ended)
        theirs.close()
        streams.close_writers()
        return kernel

    @property
    def _kernel_pid(self) -> int:
        return self._kernel.pid if self._kernel else 0

    def _own_processes(self) -> set[int]:
        """Return the processes that a sweep must spare, with their descendants."""
        self._source.settle()
        return {self._kernel_pid, self._source.zygote_pid, self._service.pid, *self.terminals.pids} - {0}

    # ------------------------------------------------------------ memory

    def _jobs(self) -> set[int]:
        return {self._kernel_pid, self._shell.pid, self._service.pid, *self.terminals.pids} - {0}

    def _spared(self) -> set[int]:
        return {self._source.zygote_pid} - {0}

    def _over_memory(self, root: int) -> None:
        """Report that the processes of a job were ended because the machine had no memory left."""
        why = OVER_MEMORY.format(self._user.memory_mb)
        run = self._run or self._shell.run
        if run and root and root == (self._shell.pid or self._kernel_pid):
            run.over_memory = why
        elif run:
            run.feed("stderr", OTHERS_ENDED.format(why).encode())
        else:
            self._note = OTHERS_ENDED.format(why).encode()

    def _kernel_ready(self, kernel: Kernel) -> None:
        kernel.ready, self._failed_starts = True, 0
        if self._run:
            self._begin(kernel, self._run)

    def _reseeded(self) -> None:
        if self._on_reseeded:
            done, self._on_reseeded = self._on_reseeded, None
            done()

    def _begin(self, kernel: Kernel, run: Execution) -> None:
        run.begun = True
        self._processes = RunProcesses(self._user, self._children, self._own_processes, self._listed)
        kernel.link.send(run.order(), run.code)
        kernel.streams.begin(run)

    def _kill(self, run: Execution) -> None:
        """Kill the kernel. What the run started is swept before the next kernel starts."""
        if self._run is run and self._kernel:
            self._kernel.signal(signal.SIGKILL)

    def _kernel_hung_up(self) -> None:
        """Make sure that a kernel ends whose socket is closed: it is ending, or its code has closed the socket."""
        kernel = self._kernel

        def insist() -> None:
            if kernel is not None and self._kernel is kernel:
                kernel.signal(signal.SIGKILL)

        self._loop.later(HANG_UP_GRACE_S, insist)

    def _kernel_lost(self) -> None:
        """End a kernel that sends nonsense: code has written to its socket, and nothing more from it can be trusted."""
        kernel = self._kernel
        if kernel is not None:
            kernel.link.close()
            kernel.signal(signal.SIGKILL)
            if self._run:
                self._run.feed("stderr", NONSENSE)

    def _receive(self, frame: Frame) -> None:
        """Handle a message of the kernel. The user's code could have written it: trust nothing in it."""
        kernel, header = self._kernel, frame.header
        if kernel is None:
            return
        event = header.get("event")
        if event == "reseeded":
            self._reseeded()
            return
        if kernel.drained != kernel.link.reads:  # once for all messages of one read
            kernel.drained = kernel.link.reads
            kernel.streams.drain()
        if header.get("wait") is True:
            kernel.link.send({"op": "ack"})
            if kernel.link.unsent > MAX_UNREAD:
                raise ProtocolError("the kernel does not read its acknowledgements")
        if event == "ready" and not kernel.ready:
            self._kernel_ready(kernel)
        elif self._run is None or header.get("run") != self._run.number:
            return  # of a thread that outlived its run
        else:
            self._handle_event(self._run, frame)

    def _handle_event(self, run: Execution, frame: Frame) -> None:
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

    def _kernel_ended(self, status: int) -> None:
        """End the run of a kernel that has ended, and start another kernel.

        After too many failed starts a run that waits for a kernel is refused instead, and the next run tries again.
        """
        kernel, run = self._kernel, self._run
        assert kernel is not None
        kernel.streams.drain()
        kernel.streams.close()
        kernel.link.close()
        self._kernel = None
        self._swept = False
        self._reseeded()
        self._failed_starts += not kernel.ready
        if self._shell.run:
            self._shell.run.kernel_lost = True
        if run and run.begun:
            self._finish(run, run.died(status))
        if self._failed_starts < MAX_FAILED_STARTS:
            self._loop.soon(self._replace_kernel)  # after the result has been sent
        elif run and not run.begun:
            self._run = None
            run.refuse("no_kernel", f"the process that runs code ended while starting ({run.died(status)})")

    def _replace_kernel(self) -> None:
        """Start a kernel if there is none, but not while a command runs: the sweep before it would end the command.

        If that is not possible now, the next run tries again.
        """
        if self._kernel is None and not self._shell.run:
            with suppress(OSError):
                self._start_kernel()

    def _command_ended(self, run: Execution, result: dict[str, Any]) -> None:
        self._finish(run, result)
        if run.kernel_lost:
            self._loop.soon(self._replace_kernel)

    def _finish(self, run: Execution, result: dict[str, Any], trace: bytes = b"") -> None:
        self._run = None
        processes, self._processes = self._processes, None
        if self._kernel:
            if processes:
                run.end_processes(processes, self._kernel.pid)
            self._kernel.streams.end()
        changed = self.artifacts.changes()
        if not self.artifacts.complete:
            result["artifacts_complete"] = False
        if self._service.loss is not None:
            result["service_loss"] = self._service.loss
        run.finish(result, trace, changed)

    def _resume(self) -> None:
        self._shell.streams.resume()
        if self._kernel:
            self._kernel.streams.resume()
