"""A machine whose workers answer at once, to test what becomes of machines."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from anyio.abc import ByteStream

from guest.client.streams import ServeStream
from guest.jobs import ANSWER, PREFACE

WORKERS = 4


class Wire(ByteStream):
    """A stream of a machine: sends what a test says, and ends when it is closed."""

    def __init__(self, *sent: bytes) -> None:
        self.sent = list(sent)
        self.received = b""
        self.closed = anyio.Event()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self.sent:
            await self.closed.wait()
        if not self.sent:
            raise anyio.EndOfStream
        return self.sent.pop(0)

    async def send(self, item: bytes) -> None:
        self.received += item

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        self.closed.set()


@dataclass(eq=False)
class FakeMachine:
    """A machine, and what a test makes of it."""

    memory: int = 1
    ill: int = 0
    died: anyio.Event = field(default_factory=anyio.Event)
    closed: anyio.Event = field(default_factory=anyio.Event)

    async def ping(self) -> None:
        if self.ill or self.died.is_set():
            raise OSError("the machine does not answer")

    async def memory_bytes(self) -> int:
        return self.memory


Handler = Callable[[FakeMachine], Awaitable[bytes]]


async def say_hello(_machine: FakeMachine) -> bytes:
    return b"hello"


class FakeWorker(Wire):
    """A worker that answers its job with what the handler returns."""

    def __init__(self, machine: FakeMachine, handler: Handler) -> None:
        super().__init__(PREFACE)
        self._machine = machine
        self._handler = handler
        self._job = anyio.Event()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self.sent:
            return self.sent.pop(0)
        await self._job.wait()
        if self.closed.is_set():
            raise anyio.EndOfStream
        body = await self._handler(self._machine)
        self.closed.set()
        return ANSWER.pack(2, len(body)) + b"{}" + body

    async def send(self, item: bytes) -> None:
        self._job.set()


@dataclass
class FakeMachines:
    """A source of such machines; remembers all of them."""

    handler: Handler
    started: list[FakeMachine] = field(default_factory=list)
    ended: list[FakeMachine] = field(default_factory=list)
    failure: Exception | None = None
    failed: anyio.Event = field(default_factory=anyio.Event)
    gate: anyio.Event | None = None  # which machines wait for while they start
    knocked: anyio.Event = field(default_factory=anyio.Event)  # one waits
    without_workers: int = 0  # so many machines make none, although they are well

    @asynccontextmanager
    async def machine(self, serve_stream: ServeStream) -> AsyncIterator[FakeMachine]:
        if self.failure is not None:
            self.failed.set()
            raise self.failure
        if self.gate is not None:
            self.knocked.set()
            await self.gate.wait()
        machine = FakeMachine()
        self.started.append(machine)
        async with anyio.create_task_group() as tasks:
            for _ in range(WORKERS if len(self.started) > self.without_workers else 0):
                tasks.start_soon(self._work, machine, serve_stream)
            try:
                yield machine
            finally:
                tasks.cancel_scope.cancel()
                self.ended.append(machine)
                machine.closed.set()

    async def _work(self, machine: FakeMachine, serve_stream: ServeStream) -> None:
        """Be one worker after the other, until the machine dies."""
        async with anyio.create_task_group() as tasks:

            async def die() -> None:
                await machine.died.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(die)
            while True:
                await serve_stream(FakeWorker(machine, self.handler))
                await anyio.lowlevel.checkpoint()
