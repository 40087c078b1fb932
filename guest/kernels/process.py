"""Runs one program after the other for a kernel: with limits, with its output kept or passed on, never left behind."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH123, PTH208

import math
import os
import resource
import select
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Literal, NamedTuple

from guest.programs import DEFAULT_SIGNALS, as_file, signal_name

CHUNK_BYTES = 64 * 1024
MAX_LAST_READS = 32  # when a program has ended; one that got away from it may go on writing for ever
WATCH_S = 0.02  # between two looks at a program's memory; what it can take meanwhile, the machine has to spare
INTERRUPT_GRACE_S = 1.0  # after an interrupt; below what the agent grants the kernel itself
REST_LIMIT_S = 5.0  # for what a program has left to be killed and reaped
REST_PAUSE_S = 0.001
PAGE = resource.getpagesize()

Cause = Literal["", "interrupted", "time", "memory"]


class Ended(NamedTuple):
    """How a program ended, and what it took."""

    status: int  # as `waitpid` gives it
    cause: Cause  # why it was ended, if it was
    wall_ns: int
    cpu_s: float
    peak_bytes: int
    stdout: bytes = b""  # the beginning of it, where it was kept
    stderr: bytes = b""
    cut: bool = False  # there was more of stdout

    @property
    def exit_code(self) -> int | None:
        """None: a signal ended it."""
        return None if os.WIFSIGNALED(self.status) else os.waitstatus_to_exitcode(self.status)

    @property
    def signal(self) -> str | None:
        """By name."""
        return signal_name(os.WTERMSIG(self.status)) if os.WIFSIGNALED(self.status) else None

    def measured(self) -> dict[str, object]:
        """As a report has it."""
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "wall_ms": self.wall_ns // 10**6,
            "cpu_ms": round(self.cpu_s * 1000),
            "peak_bytes": self.peak_bytes,
        }


class Pipe:
    """Keeps the beginning of what is written into it, and takes in the rest, so that the writer never waits."""

    def __init__(self, keep: int) -> None:
        self.fd, self.theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self.kept = bytearray()
        self.cut = False
        self._keep = keep

    def read(self) -> bool:
        """Take in what there is; False when nobody can write any more."""
        try:
            data = os.read(self.fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        room = self._keep - len(self.kept)
        self.kept += data[:room]
        self.cut |= len(data) > room
        return bool(data)

    def drain(self) -> None:
        """Take in the last of it."""
        for _ in range(MAX_LAST_READS):
            if not self.read() or not _has_more(self.fd):
                return


class Program:
    """A running program, the leader of a process group of its own."""

    def __init__(self, command: list[str], *, stdin: bytes = b"", keep: int | None = None) -> None:
        """Start it in this directory. With `keep`, that much of its output is kept; else it goes where ours goes.

        Raises:
            OSError: it cannot be started.
        """
        self.pipes = () if keep is None else (Pipe(keep), Pipe(keep))
        source = as_file(stdin)
        actions = [(os.POSIX_SPAWN_DUP2, source, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, pipe.theirs, number) for number, pipe in enumerate(self.pipes, 1)]
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
            for pipe in self.pipes:
                os.close(pipe.theirs)

    def signal(self, number: int) -> None:
        """Send a signal to it and all it has started."""
        with suppress(OSError):
            os.killpg(self.pid, number)

    def end_rest(self) -> None:
        """Kill what is left of its group, when it has ended itself: most often nothing.

        What forks without end can be born while a signal goes round (gVisor), so it goes round until nobody is left.
        """
        deadline = time.monotonic() + REST_LIMIT_S
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except OSError:
                return
            time.sleep(REST_PAUSE_S)

    def close(self) -> None:
        """Let go of its output."""
        for pipe in self.pipes:
            os.close(pipe.fd)


class Runner:
    """Waits for programs, and hears of the agent's wish to stop them."""

    def __init__(self) -> None:
        self.interrupted = False
        self._running: set[Program] = set()
        self._news, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def begin(self) -> None:
        """Forget the interrupts of what was before, and end what was started then and not waited for."""
        self._hear()
        self.interrupted = False
        for program in tuple(self._running):
            self.wait(program, wall_s=0)

    def start(self, command: list[str], *, stdin: bytes = b"", keep: int | None = None) -> Program:
        """Start a program, to be waited for later. Raises OSError if it cannot be started."""
        program = Program(command, stdin=stdin, keep=keep)
        self._running.add(program)
        return program

    def run(
        self,
        command: list[str],
        *,
        stdin: bytes = b"",
        keep: int | None = None,
        wall_s: float | None = None,
        memory_bytes: int | None = None,
    ) -> Ended:
        """Run a program to its end. Raises OSError if it cannot be started."""
        return self.wait(self.start(command, stdin=stdin, keep=keep), wall_s=wall_s, memory_bytes=memory_bytes)

    def wait(self, program: Program, *, wall_s: float | None = None, memory_bytes: int | None = None) -> Ended:
        """Wait until a program has ended, or end it when it is over a limit. Nothing of its group is left."""
        poll = select.poll()
        poll.register(self._news, select.POLLIN)
        pipes = {pipe.fd: pipe for pipe in program.pipes}
        for fd in pipes:
            poll.register(fd, select.POLLIN)
        watch = _Watch(program, wall_s, memory_bytes)
        while True:
            pid, status, usage = os.wait4(program.pid, os.WNOHANG)
            if pid:
                break
            watch.look(interrupted=self.interrupted)
            for fd, _ in poll.poll(watch.patience_ms()):
                if fd == self._news:
                    self._hear()
                elif not pipes[fd].read():
                    poll.unregister(fd)
        wall_ns = time.monotonic_ns() - program.began
        self._running.remove(program)
        program.end_rest()
        for pipe in program.pipes:
            pipe.drain()
        program.close()
        kept = [bytes(pipe.kept) for pipe in program.pipes] or [b"", b""]
        return Ended(
            status=status,
            cause=watch.cause,
            wall_ns=wall_ns,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_bytes=max(usage.ru_maxrss * 1024, watch.peak_bytes),
            stdout=kept[0],
            stderr=kept[1],
            cut=any(pipe.cut for pipe in program.pipes[:1]),
        )

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            self.interrupted |= signal.SIGINT in os.read(self._news, CHUNK_BYTES)


class _Watch:
    """Ends a program that is over a limit or unwanted."""

    def __init__(self, program: Program, wall_s: float | None, memory_bytes: int | None) -> None:
        self.cause: Cause = ""
        self.peak_bytes = 0
        self._program = program
        self._memory_bytes = memory_bytes
        self._until = math.inf if wall_s is None else time.monotonic() + wall_s
        self._look_at = math.inf if memory_bytes is None else time.monotonic() + WATCH_S

    def patience_ms(self) -> float | None:
        """How long there is nothing to look at, unless there is news."""
        due = min(self._until, self._look_at)
        return None if due == math.inf else max(0.0, due - time.monotonic()) * 1000

    def look(self, *, interrupted: bool) -> None:
        """See whether it may go on."""
        now = time.monotonic()
        if interrupted and self.cause != "interrupted":
            self.cause = "interrupted"
            self._program.signal(signal.SIGINT)
            self._until = now + INTERRUPT_GRACE_S
        elif now >= self._until:
            self._end("time")
        elif now >= self._look_at:
            self._look_at = now + WATCH_S
            used = group_bytes(self._program.pid)
            self.peak_bytes = max(self.peak_bytes, used)
            if self._memory_bytes is not None and used > self._memory_bytes:
                self._end("memory")

    def _end(self, cause: Cause) -> None:
        self.cause = self.cause or cause
        self._until = self._look_at = math.inf
        self._program.signal(signal.SIGKILL)


def group_bytes(group: int) -> int:
    """Memory of all processes of a group."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                pages += int(fields[21]) if int(fields[2]) == group else 0
    return pages * PAGE


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A signal that is only there to wake us up."""


def _has_more(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
