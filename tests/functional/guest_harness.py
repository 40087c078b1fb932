"""Starts the agent natively for tests, in new namespaces: it can neither change this host nor outlive the test."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from anyio.abc import SocketStream

from guest.client import AgentClient
from guest.client.messages import CodeError, Display, Event, Finished, Output, RunCode, RunKind, WarmUp
from guest.client.reports import CompiledReport
from guest.client.runs import Run
from guest.client.streams import ServeStream
from tests.functional.checkout import REPO, folders, readable
from tests.waiting import HANG_S

START_TIMEOUT_S = HANG_S
TMP_MB = 200

# As root, code runs as uid 1000 as in a real machine; an ordinary user can map only one uid.
SEPARATE_USER = os.geteuid() == 0
SANDBOX_USER = "1000:1000" if SEPARATE_USER else "none"

# An agent that shares its user with the code has no capabilities, and is not root, to whom limits do not apply.
LESS_RIGHTS = "setpriv --bounding-set=-all" + (" --reuid=1000 --regid=1000 --clear-groups" if SEPARATE_USER else "")

# Waits until the ids are mapped; the second exec gets the capabilities of uid 0.
MAP_SCRIPT = """
echo >/proc/self/fd/"$UP"
read -r _ </proc/self/fd/"$GO"
exec unshare --mount --pid --fork --kill-child --uts --net sh -c "$ROOT_SCRIPT" sh "$@"
"""

# A new network namespace has a loopback device, which is down: SIOCSIFFLAGS with IFF_UP.
LOOPBACK_UP = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh14x', b'lo', 1))"

# A tmpfs root with the system and this repository mounted read-only. The user namespace protects the clock and the
# kernel's entropy; the PID namespace ends with its first process.
ROOT_SCRIPT = """
set -e
"$PYTHON" -c "$LOOPBACK_UP"
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$STAGE"
cd "$STAGE"
mkdir -p dev proc tmp etc run/mcp-sandbox workspace
[ -z "$LESS_RIGHTS" ] || chmod 777 run/mcp-sandbox
ln -s /run/mcp-sandbox/hostname /run/mcp-sandbox/machine-id etc/
for link in bin sbin lib lib64; do [ -e /$link ] && cp -d /$link $link; done
for device in null zero full random urandom; do
    touch dev/$device
    mount --bind /dev/$device dev/$device
done
mkdir dev/shm
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=1777,size=${TMP_MB}m tmpfs tmp
mount -t tmpfs -o size=${TMP_MB}m tmpfs workspace
mount -t proc proc proc
while [ $# -gt 0 ]; do  # last, because the checkout may lie in /tmp
    mkdir -p "./$2"
    mount --rbind "$1" "./$2"
    mount -o remount,bind,ro "./$2"
    shift 2
done
echo root:x:0:0::/root:/bin/sh > etc/passwd
echo sandbox:x:1000:1000::/workspace:/bin/sh >> etc/passwd
exec 3<&0
chroot . /usr/bin/env -i PATH=/usr/bin:/bin PYTHONPATH="$REPO" \
    $LESS_RIGHTS "$PYTHON" -B -m guest.agent --stdio $AGENT_OPTIONS <&3 3<&- &
wait $!
"""


@contextmanager
def _agent_process(channel: socket.socket, options: tuple[str, ...], stage: str) -> Iterator[None]:
    """Run an agent on `channel` with `stage` as its root. Everything it started is gone after the block."""
    up_read, up_write = os.pipe()
    go_read, go_write = os.pipe()
    environment = {
        "PATH": os.environ["PATH"],
        "REPO": str(REPO),
        "PYTHON": sys.executable,
        "TMP_MB": str(TMP_MB),
        "AGENT_OPTIONS": " ".join(options),
        "LESS_RIGHTS": LESS_RIGHTS if "--own-pids" in options else "",
        "ROOT_SCRIPT": ROOT_SCRIPT,
        "LOOPBACK_UP": LOOPBACK_UP,
        "STAGE": stage,
        "UP": str(up_write),
        "GO": str(go_read),
    }
    bound = [str(path) for folder in folders() for path in (readable(folder), folder)]
    command = ["unshare", "--user", "sh", "-c", MAP_SCRIPT, "sh", "/usr", "/usr", *bound]
    fd = channel.fileno()
    process = subprocess.Popen(command, env=environment, stdin=fd, stdout=fd, pass_fds=(up_write, go_read))
    for theirs in (channel.detach(), up_write, go_read):
        os.close(theirs)
    try:
        with open(up_read, "rb") as up, open(go_write, "wb") as go:  # noqa: PTH123 - descriptors
            assert up.read(1), "this system does not allow user namespaces"
            _map_ids(process.pid)
            go.write(b"\n")
        yield
    finally:
        process.kill()
        process.wait()


def _map_ids(pid: int) -> None:
    proc = Path(f"/proc/{pid}")
    if SEPARATE_USER:
        (proc / "uid_map").write_text("0 0 1\n1000 1000 1\n65534 65534 1\n")
        (proc / "gid_map").write_text("0 0 1\n1000 1000 1\n")
    else:
        (proc / "uid_map").write_text(f"0 {os.geteuid()} 1\n")
        (proc / "setgroups").write_text("deny")
        (proc / "gid_map").write_text(f"0 {os.getegid()} 1\n")


@asynccontextmanager
async def agent_client(
    warm_up: str | WarmUp | None = "",
    *options: str,
    user: str = SANDBOX_USER,
    serve_stream: ServeStream | None = None,
) -> AsyncIterator[AgentClient]:
    """A client of an agent running with these options, its kernel ready unless `warm_up` is None.

    A warm-up that is just code is Python's.
    """
    async with (
        agent_stream(*options, user=user) as stream,
        AgentClient.open(stream, timeout_s=START_TIMEOUT_S, serve_stream=serve_stream) as client,
    ):
        if warm_up is not None:
            await client.warm(WarmUp(code=warm_up) if isinstance(warm_up, str) else warm_up, START_TIMEOUT_S)
        yield client


@asynccontextmanager
async def agent_stream(*options: str, user: str = SANDBOX_USER) -> AsyncIterator[SocketStream]:
    """The stream to an agent running with these options, not greeted yet."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as stage, _agent_process(theirs, ("--user", user, *options), stage):
        async with await SocketStream.from_socket(ours) as stream:
            yield stream


class Result:
    """The result of one finished run, from its events."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        last = events[-1]
        assert isinstance(last, Finished)
        self.finished = last
        self.stdout = self._text("stdout")
        self.stderr = self._text("stderr")
        self.report = next((event for event in events if isinstance(event, CompiledReport)), None)
        self.displays = [event for event in events if isinstance(event, Display)]
        self.shown = [display.data.get("text/plain", "") for display in self.displays]

    @property
    def error(self) -> CodeError:
        """The error of a run that failed."""
        assert self.finished.error is not None, self.finished
        return self.finished.error

    def _text(self, stream: str) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Output) and event.stream == stream)


async def run(client: AgentClient, code: str, **request: Any) -> Result:
    """Run code to its end."""
    async with client.run(RunCode(code, **request)) as events:
        return Result([event async for event in events])


async def command(client: AgentClient, line: str, *, keep_processes: bool = False, **options: object) -> Result:
    """Run a shell command to its end."""
    request = RunCode(line, kind="command", options=options, keep_processes=keep_processes)
    async with client.run(request) as events:
        return Result([event async for event in events])


class Active:
    """A run that has written something and goes on."""

    def __init__(self, run: Run, events: list[Event]) -> None:
        self.run = run
        self.events = events

    async def wrote(self, text: str) -> None:
        """Return when it has written `text`."""
        while text not in "".join(event.text for event in self.events if isinstance(event, Output)):
            self.events.append(await anext(self.run))

    async def end(self) -> Result:
        """Return its result when it has ended."""
        async for event in self.run:
            self.events.append(event)
        return Result(self.events)


@asynccontextmanager
async def active(client: AgentClient, code: str, kind: RunKind = "command", **more: Any) -> AsyncIterator[Active]:
    """A run that has begun: its first output is `begun`."""
    async with client.run(RunCode(code, kind, grace_s=0.5, **more)) as events:
        begun = Active(events, [])
        await begun.wrote("begun")
        yield begun


async def send(running: Run, text: str) -> None:
    """Send input to a run, all of it."""
    data = text.encode()
    while data:
        size = await running.write(data)
        assert size
        data = data[size:]
