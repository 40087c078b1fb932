"""The only place that starts processes.

A process started here belongs to its `async with`: it leads a process group, the kernel kills it when this process
dies, and leaving the block in any way kills the group and reaps it.
"""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, Process
from anyio.streams.stapled import StapledByteStream

from vmm.errors import ToolFailed, ToolMissing
from vmm.process_table import children_of
from vmm.types import Exit

REAP_S = 5.0  # a process killed with SIGKILL ends in milliseconds unless the host's disk hangs
ORPHAN_S = 1.0  # a process whose only child was killed reaps it and ends
TOOL_GRACE_S = 3.0  # after SIGTERM, mmdebstrap and apt remove their scratch directories
PIPE_BYTES = 1024 * 1024  # the most that Linux gives ordinary users by default
DRAIN_S = 0.5  # what a process printed before it ended is already in the pipe
TAIL_BYTES = 16 * 1024  # the end of a process's output, kept for error messages

NOWHERE = "/"  # not our working directory: a process that was taken over could read files relative to it
SYSTEM_DIRS = ("/usr/sbin", "/sbin")  # mkfs is there, and Debian leaves them out of the PATH of ordinary users

# The child waits for one line before it becomes the program, so that the caller can move it into a cgroup first. The
# death signal is armed before the wait: if this process dies meanwhile, nothing is left.
GATE = 'read -r _ && exec "$@"'
# The same for a process in new namespaces: it says that it is there, and waits until they have what they need.
ANNOUNCE = "echo && read -r _"
ANNOUNCED = b"\n"
# A directory inside a private home, bind-mounted where the machine's user can reach it. Only the machine's own mount
# namespace has the mount. Every system has /mnt, and machines need nothing in it.
SHOWN = "/mnt"
SHOW = f'mount --bind -- "$1" {SHOWN} && shift && exec "$@"'


def find_tool(program: str) -> str | None:
    """Return the path of a program of the host, or None."""
    return shutil.which(program, path=_search_path())


def _search_path() -> str:
    """Return our PATH without relative directories: our working directory may be a stranger's repository."""
    ours = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join((*filter(os.path.isabs, ours), *SYSTEM_DIRS))


@dataclass(frozen=True, slots=True)
class Confinement:
    """The privileges that a process drops before it becomes the program."""

    uid: int | None = None  # run as this user, who owns nothing; None: as the current user
    groups: tuple[int, ...] = ()  # that user's only groups, for devices it may open
    offline: bool = True  # in an empty network namespace
    show: Path | None = None  # a directory that user needs and cannot reach: it appears at SHOWN; only for root

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """Return `argv` behind the programs that drop the privileges."""
        privileges = ["setpriv", "--pdeathsig=KILL", "--no-new-privs"]
        if self.uid is not None:
            groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
            privileges += [f"--reuid={self.uid}", f"--regid={self.uid}", groups, "--bounding-set=-all"]
        namespaces = ["unshare", "--net", "--ipc"] if self.offline else []
        if self.offline and os.geteuid() != 0:
            namespaces += ["--user", "--map-current-user"]
        if self.show is not None:
            namespaces += ["unshare", "--mount", "sh", "-c", SHOW, "sh", str(self.show)]
        return [*namespaces, *privileges, "sh", "-c", GATE, "sh", *argv]


class RunningProcess:
    """A process that was started, and the end of its output."""

    def __init__(self, process: Process, *, stdio: bool) -> None:
        self._process = process
        self._stdio = stdio
        self._tail = bytearray()
        self._drained = anyio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> str:
        """Return the end of what the process printed."""
        return self._tail.decode("utf-8", "replace").strip()

    @property
    def stream(self) -> ByteStream:
        """Return the process's standard input and output. It must have been started with `stdio`."""
        assert self._stdio
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return StapledByteStream(self._process.stdin, self._process.stdout)

    async def wait(self) -> Exit:
        """Return how the process ended, once it has."""
        code = await self._process.wait()
        with anyio.move_on_after(DRAIN_S):  # one of its children may keep the pipe open
            await self._drained.wait()
        if code < 0:
            return Exit(signal=-code, detail=self.tail)
        return Exit(code=code, detail=self.tail)

    async def open_gate(self) -> None:
        """Let the process become the program."""
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # it ended: `wait` says why
            await self._process.stdin.send(b"\n")

    async def drain(self) -> None:
        """Read what the process prints and keep the end, so that it never blocks on a full pipe."""
        printed = self._process.stderr if self._stdio else self._process.stdout
        assert printed is not None
        async for chunk in printed:
            self._tail += chunk
            del self._tail[:-TAIL_BYTES]
        self._drained.set()

    async def kill(self) -> None:
        """Kill the whole process group and reap the process."""
        with anyio.CancelScope(shield=True):
            await self._end_namespaces()
            with anyio.move_on_after(REAP_S):
                if self._process.returncode is None:  # else the pid may have been used again
                    with suppress(ProcessLookupError):
                        os.killpg(self.pid, signal.SIGKILL)
                await self._process.wait()

    async def aclose(self) -> None:
        """Kill the process if it still runs, and close its pipes."""
        await self.kill()
        with anyio.CancelScope(shield=True):
            await self._process.aclose()

    async def _end_namespaces(self) -> None:
        """Kill children before their parent.

        A pid namespace ends with its first process. If that is orphaned, it stays a zombie until the host's init reaps
        it, which takes seconds on some hosts.
        """
        children: list[int] = []
        if self._process.returncode is None:
            with suppress(OSError):  # no file descriptor left to read /proc: then all are killed at once
                children = children_of(self.pid)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if children:
            with anyio.move_on_after(ORPHAN_S):  # a parent that outlives its children is killed next
                await self._process.wait()


@asynccontextmanager
async def spawn(
    argv: Sequence[str],
    *,
    confinement: Confinement,
    before_start: Callable[[int], None] | None = None,
    pass_fds: Sequence[int] = (),
    stdio: bool = False,
) -> AsyncIterator[RunningProcess]:
    """Run `argv` confined for the duration of the block. `before_start(pid)` is called before the program starts.

    It is called in a thread: to move a process into a cgroup, the kernel waits tens of milliseconds for all CPUs.
    With `stdio` the caller uses its standard input and output, and `tail` is the end of its standard error.
    """
    with anyio.CancelScope(shield=True):  # cancelling a start half-way would leak the process
        process = await anyio.open_process(
            confinement.wrap(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stdio else subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": _search_path(), "LC_ALL": "C.UTF-8"},  # not our environment: it may contain secrets
            cwd=NOWHERE,
            pass_fds=pass_fds,
        )
    if stdio:
        _widen_pipes(process.pid)
    running = RunningProcess(process, stdio=stdio)
    draining = asyncio.create_task(running.drain())  # not a task group: that would wrap the caller's errors
    try:
        if before_start is not None:
            with suppress(ProcessLookupError):  # it ended: `wait` says why
                await anyio.to_thread.run_sync(before_start, process.pid)
        await running.open_gate()
        yield running
    finally:
        await running.aclose()
        draining.cancel()


def _widen_pipes(pid: int) -> None:
    """Let more bytes wait in the pipes of a process: a wake-up for every 64 KB costs more than carrying them."""
    for number in (0, 1):
        with suppress(OSError):  # this user has too many large pipes already
            pipe = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            finally:
                os.close(pipe)


@contextmanager
def probe_child(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child to test something on, for the milliseconds that the block lasts."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={"PATH": _search_path()}, cwd=NOWHERE
    ) as child:
        try:
            yield child
        finally:
            child.kill()


async def run_tool(
    argv: Sequence[str],
    *,
    on_line: Callable[[str], None] = lambda line: None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> None:
    """Run a command, passing each line that it prints to `on_line`; raise ToolMissing or ToolFailed.

    Of our environment it gets only PATH: the rest may contain secrets. `env` names what else it needs.
    """
    program = find_tool(argv[0])
    if program is None:
        raise ToolMissing(argv[0])
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(
            ["setpriv", "--pdeathsig=TERM", program, *argv[1:]],  # a killed builder must not leave its tools running
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": _search_path(), "LC_ALL": "C.UTF-8", **(env or {})},
            cwd=cwd or NOWHERE,
            pass_fds=pass_fds,
        )
    try:
        tail = await _read_lines(process, on_line)
        code = await process.wait()
    finally:
        await _stop_tool(process)
    if code != 0:
        raise ToolFailed(argv, Exit(signal=-code, detail=tail) if code < 0 else Exit(code=code, detail=tail))


async def _read_lines(process: Process, on_line: Callable[[str], None]) -> str:
    assert process.stdout is not None
    tail, line = bytearray(), bytearray()
    async for chunk in process.stdout:
        tail = (tail + chunk)[-TAIL_BYTES:]
        *complete, rest = (line + chunk).split(b"\n")
        for text in complete:
            on_line(text.decode("utf-8", "replace").rstrip("\r"))
        line = bytearray(rest[-TAIL_BYTES:])
    if line:
        on_line(line.decode("utf-8", "replace"))
    return tail.decode("utf-8", "replace").strip()


async def _stop_tool(process: Process) -> None:
    """End a tool that still runs, and reap it."""
    for end, patience_s in ((signal.SIGTERM, TOOL_GRACE_S), (signal.SIGKILL, REAP_S)):
        if process.returncode is None:  # else the pid may have been used again
            with suppress(ProcessLookupError):
                os.killpg(process.pid, end)
            with anyio.move_on_after(patience_s, shield=True):
                await process.wait()
    with anyio.CancelScope(shield=True):
        await process.aclose()
