"""The workers of the template websearch-tools as a process of this host: no machine, but the same code and wire."""

import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import trustme
from anyio.abc import ByteStream, Process, SocketAttribute

from guest.client.streams import ServeStream

ROOT = Path(__file__).parents[2]


@dataclass(eq=False)
class LocalMachine:
    """A process group, and what a test makes of it."""

    process: Process
    memory: int = 0
    ill: bool = False
    workers: list[int] = field(default_factory=list)  # the processes that have waited for a job
    _arrived: anyio.Event = field(default_factory=anyio.Event)

    def note_worker(self, stream: ByteStream) -> None:
        """Remember which process has connected to wait for a job."""
        peer = stream.extra(SocketAttribute.raw_socket)
        pid, _, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        self.workers.append(pid)
        self._arrived.set()
        self._arrived = anyio.Event()

    async def wait_for_workers(self, count: int) -> None:
        """Return when so many processes have waited for a job since the machine started."""
        while len(self.workers) < count:
            await self._arrived.wait()

    async def ping(self) -> None:
        if self.ill or self.process.returncode is not None:
            raise OSError("the machine does not answer")

    async def memory_bytes(self) -> int:
        return self.memory

    def kill(self) -> None:
        """End the machine at once."""
        os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class LocalMachines:
    """A source of such machines; remembers all of them."""

    started: list[LocalMachine] = field(default_factory=list)
    ended: list[LocalMachine] = field(default_factory=list)
    failure: Exception | None = None

    @asynccontextmanager
    async def machine(self, serve_stream: ServeStream) -> AsyncIterator[LocalMachine]:
        if self.failure is not None:
            raise self.failure
        with TemporaryDirectory() as folder:
            path = f"{folder}/jobs.sock"
            jobs = await anyio.create_unix_listener(path)
            proxy = await anyio.create_tcp_listener(local_host="127.0.0.1")
            port = proxy.extra(SocketAttribute.local_port)
            command = [sys.executable, "-m", "guest.web", "--socket", path, "--proxy", f"127.0.0.1:{port}"]
            async with jobs, proxy, anyio.create_task_group() as tasks:
                process = await anyio.open_process(command, cwd=ROOT, start_new_session=True, stdin=None, stdout=None)
                machine = LocalMachine(process)
                self.started.append(machine)
                tasks.start_soon(jobs.serve, closing(serve_stream, machine.note_worker))
                tasks.start_soon(proxy.serve, closing(serve_stream))
                try:
                    yield machine
                finally:
                    with anyio.CancelScope(shield=True):
                        machine.kill()
                        await process.wait()
                        await process.aclose()
                        self.ended.append(machine)
                    tasks.cancel_scope.cancel()


def closing(
    serve: ServeStream, note: Callable[[ByteStream], None] = lambda _: None
) -> Callable[[ByteStream], Awaitable[None]]:
    """Close each stream when it has been served, as the agent channel does."""

    async def served(stream: ByteStream) -> None:
        note(stream)
        async with stream:
            await serve(stream)

    return served


def certificates(authority: trustme.CA) -> str:
    """Return what a job needs to trust the sites of a test."""
    return authority.cert_pem.bytes().decode()
