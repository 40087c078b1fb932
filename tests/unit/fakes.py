"""Leases of machines that exist only in memory, as the service sees them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, cast

import anyio
import anyio.lowlevel

from guest.client.messages import (
    Artifact,
    CodeError,
    Display,
    Event,
    FileChunk,
    FileInfo,
    Finished,
    Identity,
    Listing,
    Output,
    OutputTotals,
    RunCode,
    State,
    Status,
)
from guest.client.streams import ServeStream
from guest.errors import AgentGone, GuestError, RequestRefused
from mcp_sandbox.machines.provider import CapacityFeed, Frozen, HostFacts, Lease, LeaseTimings, MachineRequest
from mcp_sandbox.machines.unique import new_identity
from templates.catalogue import Catalogue
from vmm.types import Accel, CpuPriority, Exit, Isolation, NetworkMode, Usage

if TYPE_CHECKING:
    from guest.client import AgentClient
    from mcp_sandbox.errors import HostLost, SandboxError

TEMPLATE = "python-data-analysis"
REQUEST = MachineRequest(TEMPLATE)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
FACTS = HostFacts("fake", Isolation.VM, Accel.TCG, ("no cgroup: memory is not limited",))


def finished(status: Status = "ok", state: State = "kept", error: CodeError | None = None, **more: object) -> Finished:
    totals = cast("OutputTotals", more.pop("output", OutputTotals(0, 0)))
    exit_code = cast("int | None", more.pop("exit_code", None))
    complete = cast("bool", more.pop("artifacts_complete", True))
    return Finished(status, state, exit_code, None, error, totals, complete)


class FakeMachine:
    id = "fake"
    priority: CpuPriority | None = None
    stands_still = False
    pause_error: Exception | None = None

    async def pause(self) -> None:
        if self.pause_error is not None:
            raise self.pause_error
        self.stands_still = True

    async def resume(self) -> None:
        self.stands_still = False

    async def usage(self) -> Usage:
        return Usage(0, 0, 0.0)

    def prioritize(self, priority: CpuPriority) -> None:
        self.priority = priority

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.host_lost: HostLost | None = None  # why it ended, unless it ran out of memory

    async def wait(self) -> Exit:
        await self.ended.wait()
        if self.host_lost is not None:
            raise self.host_lost
        return Exit(signal=9, detail="out of memory")


Plan = Sequence[Event | anyio.Event]  # an anyio.Event blocks the run until a test sets it or the run is stopped


class FakeRun:
    """Plays the agent's plan for the code. The codes `forever` and `stubborn` run until they are stopped."""

    def __init__(self, agent: "FakeAgent", request: RunCode) -> None:
        self._agent = agent
        self._code = request.code
        self._events: list[Event | anyio.Event] = list(
            agent.plans.get(request.code, [Output("stdout", "ran\n"), finished()])
        )
        self._stopped = anyio.Event()
        self.done = False
        self.stdin_open = request.stdin_open
        self.finished: Finished | None = None

    async def write(self, data: bytes) -> int:
        """Take ten bytes, or wait forever while the agent takes no input."""
        if not self._agent.takes_input:
            await anyio.sleep_forever()
        self._agent.input += data[:10]
        return len(data[:10]) if self.stdin_open else 0

    async def close_stdin(self) -> None:
        self.stdin_open = False
        self._agent.input += b"<end>"

    async def stop(self) -> None:
        self._agent.stops += 1
        self._stopped.set()
        if self._events and isinstance(self._events[0], anyio.Event):
            self._events[0].set()

    def __aiter__(self) -> "FakeRun":
        return self

    async def __anext__(self) -> Event:
        await anyio.lowlevel.checkpoint()
        if self.done:
            raise StopAsyncIteration
        self._agent.running.set()
        if self._code == "forever":
            await self._until_stopped()
            self._events = [Output("stdout", "partial"), finished("interrupted")]
            self._code = ""
        elif self._code == "stubborn":
            await self._until_stopped()
            self._events = [finished("killed", "lost")]
            self._code = ""
        elif self._code == "die":
            self._agent.machine.ended.set()
            raise AgentGone("the machine's agent closed the stream")
        while isinstance(gate := self._events[0], anyio.Event):
            await gate.wait()
            self._events = [finished("interrupted")] if self._stopped.is_set() else self._events[1:]
        event = self._events.pop(0)
        assert not isinstance(event, anyio.Event)
        self.done = isinstance(event, Finished)
        if isinstance(event, Finished):
            self.finished = event
            self.stdin_open = False
        return event

    async def _until_stopped(self) -> None:
        await self._stopped.wait()


class FakeAgent:
    """An agent with files in a dictionary."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = set()  # that were created
        self.plans: dict[str, Plan] = {}
        self.requests: list[RunCode] = []
        self.running = anyio.Event()
        self.stops = 0
        self.input = b""  # of all its runs
        self.takes_input = True
        self.discarded = 0  # half-sent files
        self.room = 1 << 30  # bytes of a file that is sent in parts
        self.failure: GuestError | None = None
        self.serve_stream: ServeStream | None = None  # what the host serves its streams with
        self.open_streams = 0
        self.rests = True  # nothing runs in its machine
        self.rest_asked = anyio.Event()
        self.refresh_error: GuestError | None = None
        self.networks: list[str] = []  # of each refresh after the first
        self._failing = anyio.Event()

    def go(self) -> None:
        """Close the stream to the host."""
        self.failure = AgentGone("the machine's agent closed the stream")
        self._failing.set()

    def allow_streams(self, serve: ServeStream) -> None:
        self.serve_stream = serve

    async def refresh(self, identity: Identity) -> None:
        await anyio.lowlevel.checkpoint()
        if self.refresh_error is not None:
            raise self.refresh_error
        self.networks.append(identity.network)

    async def ping(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def at_rest(self) -> bool:
        await anyio.lowlevel.checkpoint()
        if self.failure is not None:
            raise self.failure
        self.rest_asked.set()
        self.rest_asked = anyio.Event()
        return self.rests

    async def wait_failed(self) -> None:
        await self._failing.wait()

    @asynccontextmanager
    async def run(self, request: RunCode) -> AsyncIterator[FakeRun]:
        self.requests.append(request)
        yield FakeRun(self, request)

    async def read(self, path: str, *, offset: int = 0, limit: int) -> FileChunk:
        data = self._file(path)
        part = data[offset : offset + limit]
        return FileChunk(part, len(data), offset + len(part) >= len(data))

    async def write(self, path: str, data: bytes, *, append: bool = False) -> FileInfo:
        self.files[path] = self.files.get(path, b"") * append + data
        return FileInfo(path, "file", len(self.files[path]), 0.0)

    @asynccontextmanager
    async def upload(self, path: str) -> AsyncIterator["FakeUpload"]:
        upload = FakeUpload(self, path)
        try:
            yield upload
        finally:
            self.discarded += not upload.finished

    async def make_folder(self, path: str) -> None:
        self.folders.add(path)

    async def list(self, path: str, *, recursive: bool, max_entries: int, skip: int = 0) -> Listing:
        found = [name for name in sorted(self.files) if name.startswith(path.rstrip("/") + "/")]
        entries = tuple(FileInfo(name, "file", len(self.files[name]), 0.0) for name in found[skip:])
        return Listing(entries[:max_entries], len(entries) > max_entries)

    def _file(self, path: str) -> bytes:
        if path not in self.files:
            raise RequestRefused("not_found", f"{path} does not exist")
        return self.files[path]

    def draws(self, code: str, *names: str, data: bytes = PNG) -> None:
        """Let `code` leave images with these names."""
        paths = [f"/tmp/outputs/{name}" for name in names]
        self.files.update({path: data[:-1] + bytes([n]) for n, path in enumerate(paths)})  # no two are equal
        artifacts = [Artifact(path, len(data)) for path in paths]
        self.plans[code] = [Display({"text/plain": "<Figure>"}, tuple(paths)), *artifacts, finished()]


class FakeUpload:
    """A file on its way to a fake agent."""

    def __init__(self, agent: FakeAgent, path: str) -> None:
        self._agent, self._path = agent, path
        self.parts: list[bytes] = []
        self.finished = False

    async def add(self, part: bytes) -> None:
        self.parts.append(part)
        if sum(map(len, self.parts)) > self._agent.room:
            raise RequestRefused("no_space", "No space left on device")

    async def finish(self, part: bytes) -> FileInfo:
        self.finished = True
        return await self._agent.write(self._path, b"".join([*self.parts, part]))


@dataclass(frozen=True, slots=True)
class FakeFrozen(Frozen):
    files: dict[str, bytes]
    network: NetworkMode


class FakeProvider(anyio.AsyncContextManagerMixin):
    """Leases fake machines of one host and remembers them."""

    def __init__(self, host: HostFacts = FACTS) -> None:
        self.host = host
        self.version = ""  # of its builds
        self.agents: list[FakeAgent] = []
        self.alive = 0
        self.error: SandboxError | None = None
        self.hold: anyio.Event | None = None  # starts wait for it
        self.waiting = anyio.Event()
        self.released = anyio.Event()  # set when a lease ends
        self.plans: dict[str, Plan] = {}
        self.frozen = 0  # states that exist now
        self.freeze_error: SandboxError | None = None
        self.capacity = CapacityFeed()
        self.copies: list[bool] = []  # the `copy` argument of each `thaw`

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        yield self

    @property
    def agent(self) -> FakeAgent:
        return self.agents[-1]

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        async with self._machine(request.template, request.network, request.serve_stream) as lease:
            yield lease if request.size is None else replace(lease, template=lease.template.resized(request.size))

    @asynccontextmanager
    async def freeze(self, lease: Lease) -> AsyncIterator[Frozen]:
        await anyio.lowlevel.checkpoint()
        if self.freeze_error is not None:
            raise self.freeze_error
        self.frozen += 1
        try:
            agent = cast("FakeAgent", lease.agent)
            closed, agent.open_streams = agent.open_streams, 0
            yield FakeFrozen(lease.template, lease.host, closed, dict(agent.files), lease.network)
        finally:
            self.frozen -= 1

    @asynccontextmanager
    async def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: ServeStream | None = None
    ) -> AsyncIterator[Lease]:
        self.copies.append(copy)
        async with self._machine(frozen.template.name, cast("FakeFrozen", frozen).network, serve_stream) as lease:
            cast("FakeAgent", lease.agent).files.update(cast("FakeFrozen", frozen).files)
            yield lease

    @asynccontextmanager
    async def _machine(self, template: str, network: NetworkMode, serve: ServeStream | None) -> AsyncIterator[Lease]:
        self.waiting.set()
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        machine = FakeMachine()
        agent = FakeAgent(machine)
        agent.plans.update(self.plans)
        agent.serve_stream = serve
        self.agents.append(agent)
        self.alive += 1
        try:
            yield Lease(
                machine,
                cast("AgentClient", agent),
                Catalogue().load(template),
                self.host,
                LeaseTimings(queue_s=0.001, restore_s=0.1),
                new_identity(network=network),
                self.version,
                network,
            )
        finally:
            self.alive -= 1
            self.released.set()
