"""Keeps a kernel running and runs code in it, one cell at a time, and commands beside it; replaces it when it dies."""

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
from guest.agent.loop import Link, Loop
from guest.agent.memory_watch import MemoryWatch, total_mb
from guest.agent.process_list import ProcessList
from guest.agent.run_processes import Ledger, RunProcesses
from guest.agent.service import Service
from guest.agent.shell import Shell
from guest.agent.streams import Streams
from guest.agent.sweep import owned_by, sweep
from guest.agent.terminals import Terminals
from guest.agent.user import User
from guest.environment import Changes, apply
from guest.errors import ProtocolError, RequestRefused
from guest.languages import language as facts
from guest.processes import oom_kills, thread_count
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
    """At most one kernel with at most one run in it, and commands."""

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
        self._ledger = Ledger(user, children, self._lasting, self._listed)
        self._shell = Shell(loop, channel, user, children, self._ledger)
        self.terminals = Terminals(loop, channel, user, children)
        self._service = service
        self._memory = MemoryWatch(loop, user, children, self._jobs, self._spared, self._over_memory)
        self._oom_kills = 0  # of the machine's own kernel, when the current run began
        self._note = b""  # for the next run, about what happened before it
        self._kernel: Kernel | None = None
        self._run: Execution | None = None  # in the kernel
        self._processes: RunProcesses | None = None  # of that run
        self._figures = 0
        self._runs = 0
        self._failed_starts = 0  # kernels in a row that ended before they were ready
        self._swept = True  # earlier kernels have left no processes
        self._kernel_threads = 0  # that the kernel has while no code runs
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

    def warm(self, code: str, done: Callable[[str | None], None]) -> None:
        """Run warm-up code in the source of kernels; `done` gets its traceback, or None."""
        if self.language == SHELL:
            self._shell.warm(code, done)
        else:
            self._source.warm(code, done)

    def run(self, header: dict[str, Any], code: bytes, send: Send, *, counted: bool = True) -> None:
        """Start a run. `send` gets its events and its result. Raises RequestRefused."""
        run = Execution(header, code, self._runs + 1 if counted else 0, self._user, send)
        is_command = run.kind == "command" or self.language == SHELL
        if self._run and not is_command:
            raise RequestRefused("busy", "other code is active in this sandbox; wait for it or stop it")
        self._memory.start()
        if self._note:
            run.feed("stderr", self._note)
            self._note = b""
        run.open_stdin(self._loop)
        try:
            if is_command:
                self._shell.start(run, self._command_ended)
            else:
                self._run_in_kernel(run)
        except BaseException:
            run.close_stdin()
            raise
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
        run = self._find(request)
        if run is None or run.stopped:
            return
        run.stopped = True
        if self._shell.stop(run):
            return
        if not run.begun:
            self._finish(run, run.never_began())
        elif self._kernel:
            self._kernel.signal(signal.SIGINT)
            self._loop.later(run.grace_s, lambda: self._kill(run))

    def take_input(self, request: int, data: bytes, *, end: bool) -> None:
        """Give input to a run, or tell it that no more comes. A run that has ended meanwhile ignores it."""
        run = self._find(request)
        if run is not None and run.stdin is not None:
            run.stdin.take(data, end=end)

    @property
    def _active(self) -> list[Execution]:
        """All runs: the one in the kernel first, then commands, the newest first."""
        return [*([self._run] if self._run else []), *(command.run for command in reversed(self._shell.commands))]

    def _find(self, request: int) -> Execution | None:
        return next((run for run in self._active if run.request == request), None)

    @property
    def at_rest(self) -> bool:
        """Whether no code runs: no run, terminal, service, process of the user or thread of the kernel.

        An interpreter below the kernel counts as code: it may have timers, as that of JavaScript has.
        """
        if self._active or self.terminals.pids or self._service.pid or not (self._kernel is None or self._kernel.ready):
            return False
        lasting = {1, os.getpid(), self._kernel_pid, self._source.zygote_pid, self._shell.spare.pid}
        return owned_by(self._user) <= lasting and thread_count(self._kernel_pid) <= self._kernel_threads

    def count_threads(self) -> None:
        """Remember how many threads the kernel has now, before any code of the owner has run in it."""
        self._kernel_threads = thread_count(self._kernel_pid)

    def reseed(self, done: Callable[[], None], *, everything: bool = False) -> None:
        """Make the kernel reseed its generators, or `everything` that it finds; `done` is called when it has.

        It is also called if there is no kernel.
        """
        if self._kernel is None:
            done()
            return
        self._on_reseeded = done
        self._kernel.link.send({"op": "reseed", "everything": everything})

    def settle(self) -> None:
        """Let the kernel give up memory that it does not need: a snapshot follows, which would have it in it."""
        if self._kernel:
            self._kernel.link.send({"op": "settle"})

    def change_environment(self, changes: Changes) -> None:
        """Change the environment of all code that runs from now on, in the live kernel, too."""
        apply(os.environ, changes)
        self._source.change_environment(changes)
        self._shell.change_environment(changes)
        if self._kernel:
            self._kernel.link.send({"op": "environment", "changes": dict(changes)})

    def resize(self, memory_mb: int, cpus: int) -> None:
        """Change how much memory the machine has, and tell the live kernel both."""
        self._user.memory_mb = memory_mb
        self._source.resize()
        if self._kernel:
            limits = self._user.soft_limits(addresses=facts(self.language).in_process)
            self._kernel.link.send({"op": "resize", "limits": list(limits.items()), "cpus": cpus})

    # ------------------------------------------------------------ kernel

    def _start_kernel(self) -> Kernel:
        """Start a new kernel, after everything that the last one left has been ended. Raises OSError."""
        if not self._swept:
            # Not the spare shell: code could have changed it, and then it would keep processes from being swept.
            sweep(self._user, self._children, self._lasting() - {self._shell.spare.pid} | self._shell.pids)
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

    def _lasting(self) -> set[int]:
        """Return the processes that last longer than runs, with their descendants."""
        self._source.settle()
        spares = {self._source.zygote_pid, self._shell.spare.pid}
        return {self._kernel_pid, self._service.pid, *spares, *self.terminals.pids} - {0}

    # ------------------------------------------------------------ memory

    def _jobs(self) -> set[int]:
        shells = {self._shell.spare.pid, *self._shell.pids}
        return {self._kernel_pid, *shells, self._service.pid, *self.terminals.pids} - {0}

    def _spared(self) -> set[int]:
        return {self._source.zygote_pid} - {0}

    def _over_memory(self, root: int) -> None:
        """Report that the processes of a job were ended because the machine had no memory left."""
        why = OVER_MEMORY.format(self._user.memory_mb or total_mb())
        run = self._run if root and root == self._kernel_pid else self._shell.find(root)
        if run and (run.begun or run is not self._run):  # code that waits for a kernel has taken no memory
            run.over_memory = why
        elif self._active:
            self._active[0].feed("stderr", OTHERS_ENDED.format(why).encode())
        else:
            self._note = OTHERS_ENDED.format(why).encode()

    def _was_oom_killed(self, status: int) -> bool:
        """Whether the machine's own kernel has killed a process of the current run for its memory.

        Elsewhere the agent does. A run that is stopped may be killed for that.
        """
        if self._user.memory_mb or not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return False
        return not (self._run and self._run.stopped) and oom_kills() > self._oom_kills

    def _kernel_ready(self, kernel: Kernel) -> None:
        kernel.ready, self._failed_starts = True, 0
        self.count_threads()
        if self._run:
            self._begin(kernel, self._run)

    def _reseeded(self) -> None:
        if self._on_reseeded:
            done, self._on_reseeded = self._on_reseeded, None
            done()

    def _begin(self, kernel: Kernel, run: Execution) -> None:
        run.begun = True
        self._source.settle()  # the kernel may be ready before the zygote's report of its pid is read
        self._processes = self._ledger.begin(kernel.pid, hosted=not facts(self.language).in_process)
        if not self._user.memory_mb:
            self._oom_kills = oom_kills()
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
        if self._was_oom_killed(status):
            self._over_memory(kernel.pid)
        kernel.streams.drain()
        kernel.streams.close()
        kernel.link.close()
        self._kernel = None
        self._swept = False
        self._reseeded()
        self._failed_starts += not kernel.ready
        if run and run.begun:
            self._finish(run, run.died(status))
        else:
            self._report_loss(lost=True)
        if self._failed_starts < MAX_FAILED_STARTS:
            self._loop.soon(self._replace_kernel)  # after the result has been sent
        elif run and not run.begun:
            self._run = None
            run.refuse("no_kernel", f"the process that runs code ended while starting ({run.died(status)})")

    def _replace_kernel(self) -> None:
        """Start a kernel if there is none. If that is not possible now, the next run tries again."""
        if self._kernel is None:
            with suppress(OSError):
                self._start_kernel()

    def _report_loss(self, *, lost: bool) -> None:
        """Have the command that ends next report the end of the kernel, or none if one has."""
        for command in self._shell.commands:
            command.run.kernel_lost = lost

    def _command_ended(self, run: Execution, result: dict[str, Any]) -> None:
        if run.kernel_lost:
            self._report_loss(lost=False)
        self._send_result(run, result)

    def _finish(self, run: Execution, result: dict[str, Any], trace: bytes = b"") -> None:
        """End the run in the kernel."""
        self._run = None
        processes, self._processes = self._processes, None
        if processes and self._kernel:
            run.end_processes(processes, self._kernel.pid)
        elif processes:  # a sweep ends them before the next kernel starts
            processes.release()
        if self._kernel:
            self._kernel.streams.end()
        self._send_result(run, result, trace)

    def _send_result(self, run: Execution, result: dict[str, Any], trace: bytes = b"") -> None:
        others = set().union(*(other.spills for other in self._active))
        changed = [(path, size) for path, size in self.artifacts.changes() if path not in others]
        if not self.artifacts.complete:
            result["artifacts_complete"] = False
        if self._service.loss is not None:
            result["service_loss"] = self._service.loss
        run.finish(result, trace, changed)

    def _resume(self) -> None:
        self._shell.resume()
        if self._kernel:
            self._kernel.streams.resume()
