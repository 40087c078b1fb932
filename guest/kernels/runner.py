"""Runs programs for a kernel: with limits, with their output kept or passed on, and with nothing left behind."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive

import math
import os
import select
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Literal, NamedTuple

from guest.prctl import become_subreaper
from guest.processes import (
    DEFAULT_SIGNALS,
    FEW,
    Process,
    end_all,
    input_file,
    oom_kills,
    process_count,
    process_table,
    signal_everything,
    signal_name,
    tree_of,
)

if TYPE_CHECKING:
    from resource import struct_rusage

CHUNK_BYTES = 64 * 1024
COPY_BYTES, COPY_END_BYTES = 256 * 1024, 16 * 1024  # kept of errors that are passed on
MAX_LAST_READS = 32  # after a program has ended; a process that escaped from it may go on writing
WATCH_S = 0.02  # between two looks at a program's memory; the machine must have room for what it takes meanwhile
INTERRUPT_GRACE_S = 1.0  # after an interrupt; less than the agent grants the kernel itself
OOM_BYTES = 64 * 1024 * 1024  # a program that the kernel kills for its memory has more
LEFTOVERS_S = 5.0  # for what a program has left to be killed and reaped

Cause = Literal["", "interrupted", "time", "memory"]


class Ended(NamedTuple):
    """How a program ended, and what it used."""

    status: int  # as `waitpid` gives it
    cause: Cause  # why we ended it, if we did
    wall_ns: int
    cpu_s: float
    peak_bytes: int
    stdout: bytes = b""  # the beginning of it, if it was kept
    stderr: bytes = b""
    cut: bool = False  # there was more stdout
    oom_killed: bool = False  # by the kernel, because memory ran out

    @property
    def exit_code(self) -> int | None:
        """None: a signal ended it."""
        return None if os.WIFSIGNALED(self.status) else os.waitstatus_to_exitcode(self.status)

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it."""
        return signal_name(os.WTERMSIG(self.status)) if os.WIFSIGNALED(self.status) else None

    def measured(self) -> dict[str, object]:
        """Return what a report says about it."""
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "wall_ms": self.wall_ns // 10**6,
            "cpu_ms": round(self.cpu_s * 1000),
            "peak_bytes": self.peak_bytes,
        }


class Pipe:
    """Keeps the first bytes of a program's output and discards the rest, so that the program never waits."""

    def __init__(self, keep: int) -> None:
        self.fd, self.theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self.kept = bytearray()
        self.cut = False
        self._keep = keep

    def read(self) -> bool:
        """Read the available bytes; False when all writers have closed the pipe."""
        try:
            data = os.read(self.fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        room = self._keep - len(self.kept)
        self.kept += data[:room]
        self.cut |= len(data) > room
        return bool(data)

    def all_kept(self) -> bytes:
        """Return what was kept."""
        return bytes(self.kept)

    def drain(self) -> None:
        """Read the rest."""
        for _ in range(MAX_LAST_READS):
            if not self.read() or not _has_more(self.fd):
                return


class Copy(Pipe):
    """Passes a program's errors on to our own, and keeps their beginning and their end."""

    def __init__(self, keep: int) -> None:
        super().__init__(keep)
        self._end = b""

    def read(self) -> bool:
        """Read and write the available bytes; False when all writers have closed the pipe."""
        try:
            data = os.read(self.fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        with suppress(OSError), open(2, "wb", closefd=False) as ours:
            ours.write(data)
        room = self._keep - len(self.kept)
        self.kept += data[:room]
        self._end = (self._end + data[room:])[-COPY_END_BYTES:]
        return bool(data)

    def all_kept(self) -> bytes:
        """Return the beginning and the end."""
        return bytes(self.kept) + self._end


class Program:
    """A running program, the leader of its own process group."""

    def __init__(self, command: list[str], *, stdin: bytes | int = b"", keep: int | None = None) -> None:
        """Start it in this directory. With `keep`, that much of its output is kept; else it shares our stdout, and its
        errors are passed on to our own.

        `stdin` is what it reads, or a descriptor to read from, which is closed here.

        Raises:
            OSError: it cannot be started.
        """
        self.end: tuple[int, struct_rusage] | None = None  # when it has been reaped
        self.pipes = {2: Copy(COPY_BYTES)} if keep is None else {1: Pipe(keep), 2: Pipe(keep)}
        self.oom_kills = oom_kills()
        source = stdin if isinstance(stdin, int) else input_file(stdin)
        actions = [(os.POSIX_SPAWN_DUP2, source, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, pipe.theirs, number) for number, pipe in self.pipes.items()]
        self.began = time.monotonic_ns()
        try:
            self.pid = os.posix_spawnp(
                command[0], command, os.environ, file_actions=actions, setpgroup=0, setsigdef=DEFAULT_SIGNALS
            )
        except OSError:
            self.close()
            raise
        finally:
            os.close(source)
            for pipe in self.pipes.values():
                os.close(pipe.theirs)

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        with suppress(OSError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Close the pipes of its output."""
        for pipe in self.pipes.values():
            os.close(pipe.fd)


class Runner:
    """Starts programs, waits for them, and interrupts them when the agent interrupts this process.

    This process is a subreaper: all processes of a program stay below it, even those that leave their process group or
    lose their parent.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._running: dict[int, Program] = {}
        self._few = process_count() + FEW
        become_subreaper()
        self._wakeups, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def begin(self) -> None:
        """Forget earlier interrupts, and end programs that were started and never waited for."""
        self._take_signals()
        self.interrupted = False
        for program in tuple(self._running.values()):
            self.wait(program, wall_s=0)
        self._few = process_count() + FEW

    def start(self, command: list[str], *, stdin: bytes | int = b"", keep: int | None = None) -> Program:
        """Start a program, to be waited for later. Raises OSError if it cannot be started."""
        program = Program(command, stdin=stdin, keep=keep)
        self._running[program.pid] = program
        return program

    def run(
        self,
        command: list[str],
        *,
        stdin: bytes | int = b"",
        keep: int | None = None,
        wall_s: float | None = None,
        memory_bytes: int | None = None,
    ) -> Ended:
        """Run a program to its end. Raises OSError if it cannot be started."""
        return self.wait(self.start(command, stdin=stdin, keep=keep), wall_s=wall_s, memory_bytes=memory_bytes)

    def wait(self, program: Program, *, wall_s: float | None = None, memory_bytes: int | None = None) -> Ended:
        """Wait until a program has ended, or end it when it exceeds a limit. All its processes have ended then."""
        poll = select.poll()
        poll.register(self._wakeups, select.POLLIN)
        pipes = {pipe.fd: pipe for pipe in program.pipes.values()}
        for fd in pipes:
            poll.register(fd, select.POLLIN)
        watch = _Watch(self, program, wall_s, memory_bytes)
        while True:
            self._reap()
            if program.end is not None:
                break
            watch.look(interrupted=self.interrupted)
            for fd, _ in poll.poll(watch.patience_ms()):
                if fd == self._wakeups:
                    self._take_signals()
                elif not pipes[fd].read():
                    poll.unregister(fd)
        wall_ns = time.monotonic_ns() - program.began
        self._end_leftovers()
        for pipe in program.pipes.values():
            pipe.drain()
        program.close()
        status, usage = program.end
        kept = {number: pipe.all_kept() for number, pipe in program.pipes.items()}
        peak_bytes = max(usage.ru_maxrss * 1024, watch.peak_bytes)
        return Ended(
            status=status,
            cause=watch.cause,
            wall_ns=wall_ns,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_bytes=peak_bytes,
            stdout=kept.get(1, b""),
            stderr=kept[2],
            cut=1 in program.pipes and program.pipes[1].cut,
            oom_killed=not watch.cause and was_oom_killed(program, status, peak_bytes),
        )

    def used_bytes(self, program: Program) -> int:
        """Return the memory of a program and everything it has started."""
        table = process_table()
        return sum(table[pid].resident_bytes for pid in self._processes(program, table) & table.keys())

    def _processes(self, program: Program | None, table: dict[int, Process]) -> set[int]:
        """Return the processes of a program and of all programs that have ended."""
        kernel = os.getpid()
        others = [pid for pid, other in self._running.items() if other is not program]
        return tree_of({kernel}, table) - {kernel} - tree_of(others, table)

    def _end_leftovers(self) -> None:
        """Kill what programs that have ended have left running, most often nothing."""
        with suppress(ChildProcessError):  # no process is left: one system call finds out
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            few = process_count() <= self._few
            end_all(lambda: self._processes(None, process_table()), self._reap, LEFTOVERS_S, signal_everything, few=few)

    def _reap(self) -> None:
        """Reap all children that have ended: programs, and orphans of theirs."""
        with suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if not pid:
                    return
                if program := self._running.pop(pid, None):
                    program.end = status, usage

    def _take_signals(self) -> None:
        with suppress(BlockingIOError):
            self.interrupted |= signal.SIGINT in os.read(self._wakeups, CHUNK_BYTES)


class _Watch:
    """Ends a program that exceeds a limit or is interrupted."""

    def __init__(self, runner: Runner, program: Program, wall_s: float | None, memory_bytes: int | None) -> None:
        self.cause: Cause = ""
        self.peak_bytes = 0
        self._runner = runner
        self._program = program
        self._memory_bytes = memory_bytes
        self._until = math.inf if wall_s is None else time.monotonic() + wall_s
        self._look_at = math.inf if memory_bytes is None else time.monotonic() + WATCH_S

    def patience_ms(self) -> float | None:
        """Return how long to wait until the next look, unless something happens."""
        due = min(self._until, self._look_at)
        return None if due == math.inf else max(0.0, due - time.monotonic()) * 1000

    def look(self, *, interrupted: bool) -> None:
        """End the program if it must not go on."""
        now = time.monotonic()
        if interrupted and self.cause != "interrupted":
            self.cause = "interrupted"
            self._program.signal(signal.SIGINT)
            self._until = now + INTERRUPT_GRACE_S
        elif now >= self._until:
            self._end("time")
        elif now >= self._look_at:
            self._look_at = now + WATCH_S
            used = self._runner.used_bytes(self._program)
            self.peak_bytes = max(self.peak_bytes, used)
            if self._memory_bytes is not None and used > self._memory_bytes:
                self._end("memory")

    def _end(self, cause: Cause) -> None:
        self.cause = self.cause or cause
        self._until = self._look_at = math.inf
        self._program.signal(signal.SIGKILL)


def was_oom_killed(program: Program, status: int, peak_bytes: int) -> bool:
    """Return whether the kernel killed a program for its memory. A small one was killed for another reason.

    The kernel counts all processes that it killed so, in bubblewrap even those of other machines.
    """
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return killed and peak_bytes > OOM_BYTES and oom_kills() > program.oom_kills


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal that only has to wake this process."""


def _has_more(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
