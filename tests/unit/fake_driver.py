"""A driver whose machines are socket pairs, for tests of the logic around machines."""

import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, SocketStream

from vmm.driver import Machine, check_network
from vmm.errors import MachineLost, SnapshotFailed
from vmm.types import Capabilities, CpuPriority, Exit, Isolation, MachineSpec, NetworkDevice, Probe, Snapshot, Usage

Memory = dict[str, Any]  # the state of a machine, which a snapshot saves
Guest = Callable[[ByteStream, Memory], Coroutine[Any, Any, None]]
STATE = "state"  # the file of a snapshot


class FakeMachine:
    """One end of a socket pair. The test's guest has the other."""

    def __init__(self, spec: MachineSpec, stream: SocketStream, memory: Memory) -> None:
        self.spec = spec
        self.memory = memory
        self.paused = False
        self.device: NetworkDevice | None = None
        self._stream: SocketStream | None = stream
        self._ended = anyio.Event()

    @property
    def id(self) -> str:
        return self.spec.id

    async def connect(self) -> ByteStream:
        if self._stream is None:
            raise MachineLost(f"the agent's stream of machine {self.id} was already taken")
        stream, self._stream = self._stream, None
        return stream

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    def prioritize(self, priority: CpuPriority) -> None:
        pass

    async def usage(self) -> Usage:
        return Usage(memory_bytes=0, private_bytes=0, cpu_s=0.0)

    async def wait(self) -> Exit:
        await self._ended.wait()
        return Exit(code=0)

    def end(self) -> None:
        """End the machine."""
        self._ended.set()


class FakeDriver:
    """Keeps a list of running machines, so that a test can check that none is left."""

    name = "fake"
    capabilities = Capabilities(isolation=Isolation.NAMESPACE, snapshot=True)

    def __init__(self, guest: Guest | None = None) -> None:
        self._guest = guest
        self.running: list[FakeMachine] = []
        self.launched = 0
        self.restored = 0

    async def probe(self) -> Probe:
        return Probe(usable=True, reason="it is a fake", version="fake")

    async def fingerprint(self) -> str:
        return "fake"

    @asynccontextmanager
    async def launch(self, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        self.launched += 1
        async with self._machine(spec, {}) as machine:
            yield machine

    async def snapshot(self, machine: Machine, dst: Path, *, keep: bool = False) -> Snapshot:
        assert isinstance(machine, FakeMachine)
        await anyio.lowlevel.checkpoint()
        (dst / STATE).write_text(json.dumps(machine.memory))
        return Snapshot(driver=self.name, path=dst)

    @asynccontextmanager
    async def restore(self, snapshot: Snapshot, spec: MachineSpec) -> AsyncIterator[Machine]:
        check_network(self, spec)
        self.restored += 1
        try:
            memory = json.loads((snapshot.path / STATE).read_text())
        except OSError as error:
            raise SnapshotFailed(f"the snapshot in {snapshot.path} cannot be read: {error}") from error
        async with self._machine(spec, memory) as machine:
            yield machine

    async def aclose(self) -> None:
        assert not self.running, "machines are still running"

    @asynccontextmanager
    async def _machine(self, spec: MachineSpec, memory: Memory) -> AsyncIterator[FakeMachine]:
        ours, theirs = socket.socketpair()
        with anyio.CancelScope(shield=True):  # cancelling here would leak one of them
            stream, other = await SocketStream.from_socket(ours), await SocketStream.from_socket(theirs)
        machine = FakeMachine(spec, stream, memory)
        self.running.append(machine)
        try:
            async with anyio.create_task_group() as tasks:
                if self._guest is not None:
                    tasks.start_soon(self._guest, other, memory)
                yield machine
                tasks.cancel_scope.cancel()
        finally:
            self.running.remove(machine)
            machine.end()
            with anyio.CancelScope(shield=True):
                await stream.aclose()
                await other.aclose()
