"""The only place that starts processes.

A process started here belongs to its `async with`: it leads a group of its own, the kernel kills it when this
process dies, and leaving the block kills the group and reaps it, however the block is left.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import ByteStream, Process
from anyio.streams.stapled import StapledByteStream

from vmm.errors import ToolFailed, ToolMissing
from vmm.process_table import children_of
from vmm.types import Exit

REAP_S = 5.0  # a process killed with SIGKILL ends in milliseconds unless the host's disk hangs
ORPHAN_S = 1.0  # a process whose only child was killed takes it in and ends
TOOL_GRACE_S = 3.0  # mmdebstrap and apt remove their scratch directories when asked to end
LAST_WORDS_S = 0.5  # what an ended process had printed is in the pipe already
TAIL_BYTES = 16 * 1024  # the last words of a process, kept for error messages

SYSTEM_DIRS = ("/usr/sbin", "/sbin")  # Debian keeps mkfs and its like out of the PATH of ordinary users

# The child waits for one line before it becomes the program. Until then its owner can put it under limits; and
# since the death signal is armed before the wait, an owner that dies in between leaves nothing behind.
GATE = 'read -r _ && exec "$@"'
# A directory below a home that is closed to others, shown where everybody can get: only this process sees it there.
# Every system has the place, and what it hides there nobody needs.
SHOWN = "/mnt"
SHOW = f'mount --bind -- "$1" {SHOWN} && shift && exec "$@"'


def find_tool(program: str) -> str | None:
    """Where a program of the host's is."""
    return shutil.which(program, path=_search_path())


def _search_path() -> str:
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *SYSTEM_DIRS))


@dataclass(frozen=True, slots=True)
class Confinement:
    """What is taken away from a process before it becomes the program."""

    uid: int | None = None  # become this user, who owns nothing; None: stay who we are
    groups: tuple[int, ...] = ()  # the only groups that user is in, for devices it may open
    offline: bool = True  # a network namespace with nothing in it
    show: Path | None = None  # a directory that user has to read but cannot get to: it is at SHOWN; needs root

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """`argv` behind the tools that take the privileges away."""
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
    """A started process, and its last words."""

    def __init__(self, process: Process, *, talks: bool) -> None:
        self._process = process
        self._talks = talks
        self._tail = bytearray()
        self._drained = anyio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> str:
        """The end of what the process printed."""
        return self._tail.decode("utf-8", "replace").strip()

    @property
    def stream(self) -> ByteStream:
        """The process's standard input and output, of one that was started to talk."""
        assert self._talks
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return StapledByteStream(self._process.stdin, self._process.stdout)

    async def wait(self) -> Exit:
        """Wait for the end and say how it came."""
        code = await self._process.wait()
        with anyio.move_on_after(LAST_WORDS_S):  # a child of its may hold the pipe open for longer
            await self._drained.wait()
        if code < 0:
            return Exit(signal=-code, detail=self.tail)
        return Exit(code=code, detail=self.tail)

    async def open_gate(self) -> None:
        """Let the process become the program."""
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # it ended: `wait` tells why
            await self._process.stdin.send(b"\n")

    async def drain(self) -> None:
        """Keep the end of what the process prints, so that it never blocks on us."""
        printed = self._process.stderr if self._talks else self._process.stdout
        assert printed is not None
        async for chunk in printed:
            self._tail += chunk
            del self._tail[:-TAIL_BYTES]
        self._drained.set()

    async def kill(self) -> None:
        """End the whole group, and reap the process."""
        with anyio.CancelScope(shield=True):
            await self._end_namespaces()
            with anyio.move_on_after(REAP_S):
                if self._process.returncode is None:  # else the number may belong to somebody else by now
                    with suppress(ProcessLookupError):
                        os.killpg(self.pid, signal.SIGKILL)
                await self._process.wait()
            await self._process.aclose()

    async def _end_namespaces(self) -> None:
        """Kill children before their parent. The first process of a namespace takes all others with it; if its parent
        is gone it stays a zombie until the host's own first process looks, which takes seconds on some hosts."""
        children: list[int] = []
        if self._process.returncode is None:
            with suppress(OSError):  # no descriptor left to look with: then all end at once, which is better than never
                children = children_of(self.pid)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if children:
            with anyio.move_on_after(ORPHAN_S):  # a parent that does not end with its children is killed next
                await self._process.wait()


@asynccontextmanager
async def spawn(
    argv: Sequence[str],
    *,
    confinement: Confinement,
    before_start: Callable[[int], None] = lambda pid: None,
    pass_fds: Sequence[int] = (),
    talks: bool = False,
) -> AsyncIterator[RunningProcess]:
    """Start `argv` confined, for as long as the block lasts. `before_start(pid)` runs before the program does.

    With `talks` its standard input and output are the caller's to use; its last words are what it says on stderr.
    """
    with anyio.CancelScope(shield=True):  # a start that is cancelled half-way would leave a process nobody waits for
        process = await anyio.open_process(
            confinement.wrap(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if talks else subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": _search_path(), "LC_ALL": "C.UTF-8"},  # nothing of ours: there may be secrets in it
            pass_fds=pass_fds,
        )
    running = RunningProcess(process, talks=talks)
    draining = asyncio.create_task(running.drain())  # not a task group: that would wrap the caller's errors
    try:
        before_start(process.pid)
        await running.open_gate()
        yield running
    finally:
        await running.kill()
        draining.cancel()


@contextmanager
def bystander(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child to try something out on, for the milliseconds the block lasts. It should end with its standard input."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={"PATH": _search_path()}
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
    bare: bool = False,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> None:
    """Run a command to its end, handing over what it prints line by line. Raises ToolMissing or ToolFailed.

    With `bare` it gets nothing of our environment, for commands that work where a machine's processes are.
    """
    program = find_tool(argv[0])
    if program is None:
        raise ToolMissing(argv[0])
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(
            ["setpriv", "--pdeathsig=TERM", program, *argv[1:]],  # a build must not go on when its builder was killed
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**({} if bare else os.environ), "PATH": _search_path(), **(env or {})},
            cwd=cwd,
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
    """End a tool that is still running, and reap it either way."""
    for end, patience_s in ((signal.SIGTERM, TOOL_GRACE_S), (signal.SIGKILL, REAP_S)):
        if process.returncode is None:  # else the number may belong to somebody else by now
            with suppress(ProcessLookupError):
                os.killpg(process.pid, end)
            with anyio.move_on_after(patience_s, shield=True):
                await process.wait()
    with anyio.CancelScope(shield=True):
        await process.aclose()
