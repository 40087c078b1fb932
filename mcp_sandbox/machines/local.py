"""Machines of this host: started from their template the moment somebody asks."""

import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
from anyio import AsyncContextManagerMixin

from guest.client import AgentClient
from guest.client.messages import Identity
from guest.errors import AgentGone
from mcp_sandbox.errors import BadRequest, CannotFreeze, HostNotReady, StateLost
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.mapping import mapped
from mcp_sandbox.machines.provider import CapacityFeed, Frozen, HostFacts, Lease, LeaseTimings, MachineRequest
from mcp_sandbox.machines.unique import new_identity, open_unique, same_again
from mcp_sandbox.processes import of_pid
from templates.build import BuiltTemplate
from templates.locks import hold
from templates.model import Template
from vmm.driver import Driver, Machine, SnapshotDriver
from vmm.errors import LaunchFailed, SnapshotFailed
from vmm.types import MachineSpec, Snapshot

LAST_WORDS_S = 2.0  # a process that closed its output is about to end


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a machine of this host was started from, and is started from again when it was frozen."""

    template: Template
    version: str
    spec: MachineSpec  # a template that was built anew since has other files
    entries: tuple[Path, ...]  # where in the store those files are: held as long as they are needed


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLease(Lease):
    """A machine of this host, with what it takes to start it again."""

    machine: Machine
    origin: _Origin
    identity: Identity


@dataclass(frozen=True, slots=True)
class LocalFrozen(Frozen):
    """A machine frozen into a directory of this host."""

    snapshot: Snapshot
    origin: _Origin
    identity: Identity


class LocalProvider(AsyncContextManagerMixin):
    """Starts machines with one driver, a few at a time."""

    def __init__(self, driver: Driver, builds: Builds, *, max_restores: int, run_dir: Path) -> None:
        self._driver = driver
        self._builds = builds
        self._run_dir = run_dir
        self._restores = anyio.CapacityLimiter(max_restores)
        self._probing = anyio.Lock()
        self._facts: HostFacts | None = None
        self.capacity = CapacityFeed()  # the settings limit one host, and it neither grows nor shrinks

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        yield self

    async def facts(self) -> HostFacts:
        """What this host offers. The first call probes it, which can take seconds.

        Raises:
            HostNotReady: no machine can be started here.
        """
        async with self._probing:
            if self._facts is None:
                with mapped():
                    verdict = await self._driver.probe()
                if not verdict.usable:
                    raise HostNotReady(verdict.reason, verdict.fix)
                isolation = self._driver.capabilities.isolation
                self._facts = HostFacts(self._driver.name, isolation, verdict.accel, verdict.limits)
            return self._facts

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        """Start a machine with its own entropy, clock and identity, and greet its agent.

        Raises:
            UnknownTemplate, UnusableTemplate, TemplateNotBuilt, HostNotReady, SandboxError: there is no machine.
        """
        asked_at = anyio.current_time()
        await self.facts()  # says why, if this host cannot start any
        with ExitStack() as stack:
            built = await self._builds.hold(request.template, stack)
            if not request.is_standard(built.template):
                raise BadRequest(f"Machines of template {request.template!r} have a fixed size and no network.")
            identity = new_identity()
            source = start(self._driver, built, identity)
            origin = _Origin(built.template, built.version, built.spec(identity.hostname), built.entries())
            async with self._leased(source, origin, identity, asked_at) as lease:
                yield lease

    @asynccontextmanager
    async def freeze(self, lease: Lease) -> AsyncIterator[Frozen]:
        """The state of a machine in a directory of its own. The machine goes on, its clock set right.

        Raises:
            CannotFreeze: the driver takes no snapshots.
            SandboxError: it could not be frozen, and goes on if it can.
        """
        driver = self._driver
        if not (driver.capabilities.snapshot and isinstance(driver, SnapshotDriver)):
            raise CannotFreeze(driver.name)
        assert isinstance(lease, LocalLease), "a lease of this provider"
        async with self._directory() as directory:
            with _held(lease.origin):
                with mapped("frozen"):
                    await lease.agent.usage()  # answers come in order: now nothing is on its way any more
                    with anyio.CancelScope(shield=True):  # a machine that is left half-way may stand still for ever
                        snapshot = await driver.snapshot(lease.machine, directory, keep=True)
                        await lease.agent.refresh(same_again(lease.identity))
                yield LocalFrozen(lease.template, lease.host, snapshot, lease.origin, lease.identity)

    @asynccontextmanager
    async def thaw(self, frozen: Frozen, *, copy: bool) -> AsyncIterator[Lease]:
        """A machine that goes on from a frozen state, in the condition in which `acquire` gives one.

        Raises:
            StateLost: the state cannot be read.
            SandboxError: there is no machine this time.
        """
        asked_at = anyio.current_time()
        assert isinstance(frozen, LocalFrozen), "frozen by this provider"
        identity = new_identity() if copy else same_again(frozen.identity)
        origin = replace(frozen.origin, spec=replace(frozen.origin.spec, id=identity.hostname))
        source = _thawed(self._driver, frozen.snapshot, origin.spec, identity)
        with _held(origin):
            async with self._leased(source, origin, identity, asked_at) as lease:
                yield lease

    @asynccontextmanager
    async def _leased(
        self,
        source: AbstractAsyncContextManager[tuple[Machine, AgentClient]],
        origin: _Origin,
        identity: Identity,
        asked_at: float,
    ) -> AsyncIterator[Lease]:
        facts = await self.facts()
        async with AsyncExitStack() as stack:
            async with self._restores:
                began_at = anyio.current_time()
                with mapped():
                    machine, agent = await stack.enter_async_context(source)
                restored_at = anyio.current_time()
            timings = LeaseTimings(queue_s=began_at - asked_at, restore_s=restored_at - began_at)
            yield LocalLease(
                machine=machine,
                agent=agent,
                template=origin.template,
                host=facts,
                timings=timings,
                version=origin.version,
                origin=origin,
                identity=identity,
            )

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[Path]:
        """A new directory that nobody else can look into. Its name says whose it is, for the clean-up after a crash."""
        server = of_pid(os.getpid())
        assert server is not None
        path = self._run_dir / f"{server.pid}-{server.started}-frozen-{secrets.token_hex(4)}"
        with mapped("frozen"):
            path.mkdir(mode=0o700, parents=True)
        try:
            yield path
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(partial(shutil.rmtree, path, ignore_errors=True))


@asynccontextmanager
async def start(driver: Driver, built: BuiltTemplate, identity: Identity) -> AsyncIterator[tuple[Machine, AgentClient]]:
    """A machine that is warm and unique, and its agent: from the snapshot, or from nothing where there is none.

    Raises:
        SandboxError: it is not unique, or its clock cannot be set right.
    """
    warmup = built.warm_up if built.snapshot is None else None
    async with AsyncExitStack() as stack:
        machine = await stack.enter_async_context(start_machine(driver, built, identity.hostname))
        stream = await machine.connect()
        opening = open_unique(stream, identity, driver.capabilities.isolation, warmup)
        try:
            agent = await stack.enter_async_context(opening)
        except AgentGone as error:
            raise LaunchFailed(f"machine {machine.id} ended at its start: {await _last_words(machine)}") from error
        yield machine, agent


async def _last_words(machine: Machine) -> str:
    """Why a machine has ended, which its driver knows a moment after its agent is gone."""
    with anyio.move_on_after(LAST_WORDS_S):
        return str(await machine.wait())
    return "its agent closed the stream"


def start_machine(driver: Driver, built: BuiltTemplate, name: str) -> AbstractAsyncContextManager[Machine]:
    """A machine that nobody has spoken to yet."""
    if built.snapshot is None:
        return driver.launch(built.spec(name))
    assert isinstance(driver, SnapshotDriver)  # as its capabilities said when the template was built
    return driver.restore(built.snapshot, built.spec(name))


@asynccontextmanager
async def _thawed(
    driver: Driver, snapshot: Snapshot, spec: MachineSpec, identity: Identity
) -> AsyncIterator[tuple[Machine, AgentClient]]:
    assert isinstance(driver, SnapshotDriver)  # it froze the machine
    async with AsyncExitStack() as stack:
        try:
            machine = await stack.enter_async_context(driver.restore(snapshot, spec))
        except SnapshotFailed as error:
            raise StateLost(str(error)) from error
        stream = await machine.connect()
        yield machine, await stack.enter_async_context(open_unique(stream, identity, driver.capabilities.isolation))


@contextmanager
def _held(origin: _Origin) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(origin.entries))
        except FileNotFoundError as error:
            raise StateLost(f"what it was started from is not there any more: {error.filename}") from error
        yield
