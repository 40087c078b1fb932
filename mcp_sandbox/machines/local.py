"""A provider that starts machines on this host when they are requested."""

import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread
from anyio import AsyncContextManagerMixin

from guest.client import AgentClient
from guest.client.messages import Identity, Size
from guest.client.streams import ServeStream
from guest.errors import AgentGone, GuestError
from mcp_sandbox.errors import CannotFreeze, HostNotReady, NetworkUnsupported, SandboxError, StateLost
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.mapping import map_errors
from mcp_sandbox.machines.provider import CapacityFeed, Frozen, HostFacts, Lease, LeaseTimings, MachineRequest
from mcp_sandbox.machines.unique import new_identity, open_unique, renewed, with_device
from templates.build import BuiltTemplate
from templates.locks import hold
from templates.model import MachineSize, Template
from templates.removal import remove_tree
from vmm.driver import Driver, Machine, SnapshotDriver
from vmm.errors import LaunchFailed, SnapshotFailed, VmmError
from vmm.process_table import of_pid
from vmm.types import CpuPriority, MachineSpec, NetworkMode, Snapshot

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

COMMON_STEP_MB = 256  # of memory, between two sizes that get a snapshot of their own
REOPEN_S = 5.0  # a machine that could not be frozen answers at once, or is lost
EXIT_REASON_S = 2.0  # a process that closed its output is about to end

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a machine was started from. A frozen state can only be restored with the same files."""

    template: Template
    version: str
    spec: MachineSpec
    entries: tuple[Path, ...]  # the store's entries with the files of `spec`


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLease(Lease):
    """A machine on this host, and what its frozen state needs to be restored."""

    machine: Machine
    origin: _Origin


@dataclass(frozen=True, slots=True)
class LocalFrozen(Frozen):
    """A machine's state in a directory on this host."""

    snapshot: Snapshot
    files: Mapping[str, tuple[int, int]]  # of the snapshot, with size and modification time
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
        self._tasks: TaskGroup | None = None  # while it is open
        self._taking = False  # a snapshot
        self._failed: list[MachineSize] = []  # sizes of which no snapshot could be taken
        self.capacity = CapacityFeed()  # only the settings limit a single host

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        async with anyio.create_task_group() as self._tasks:
            try:
                yield self
            finally:
                self._tasks.cancel_scope.cancel()

    async def facts(self) -> HostFacts:
        """Return the facts about this host. The first call probes it, which can take seconds.

        Raises:
            HostNotReady: this host cannot start machines.
        """
        async with self._probing:
            if self._facts is None:
                with map_errors():
                    verdict = await self._driver.probe()
                if not verdict.usable:
                    raise HostNotReady(verdict.reason, verdict.fix)
                isolation = self._driver.capabilities.isolation
                self._facts = HostFacts(self._driver.name, isolation, verdict.accel, verdict.missing_protections)
            return self._facts

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        """Start a machine with its own entropy, clock and identity, and greet its agent.

        Raises:
            UnknownTemplate, UnusableTemplate, TemplateNotBuilt, TemplateDamaged: the template cannot be used.
            HostNotReady, NetworkUnsupported, StartFailed: there is no machine.
        """
        asked_at = anyio.current_time()
        await self.facts()  # raises if this host cannot start machines
        with ExitStack() as stack:
            self._check(request)
            built = await self._builds.hold(request.template, stack, request.size)
            identity = self._identity(request, built)
            source = start(
                self._driver, built, identity, request.network, request.serve_stream, rehearse=request.rehearse
            )
            spec = built.spec(identity.hostname, request.network)
            origin = _Origin(built.template, built.version, spec, built.entries())
            diagnose = partial(self._builds.check, built)
            cold = self._driver.capabilities.fixed_size and built.snapshot is None
            async with self._leased(source, diagnose, origin, identity, asked_at, cold=cold) as lease:
                if cold:
                    self._take_snapshot(built.template)
                yield lease

    def _check(self, request: MachineRequest) -> None:
        if request.network not in self._driver.capabilities.networks:
            raise NetworkUnsupported(self._driver.name, request.network)

    def _identity(self, request: MachineRequest, built: BuiltTemplate) -> Identity:
        """Return a new identity. The size is told only to machines whose snapshot has another one."""
        identity = new_identity(network=request.network)
        if request.size is None or built.snapshot is None or self._driver.capabilities.fixed_size:
            return identity
        return replace(identity, size=Size(request.size.memory_mb, request.size.vcpus))

    def _take_snapshot(self, template: Template) -> None:
        """Take a snapshot in the background, so that the next machine of this size starts fast. One at a time.

        Only of common sizes: a client that asks for one odd size after the other would keep the host busy.
        """

        async def take() -> None:
            try:
                await self._builds.snapshot_of(template)
            except Exception as error:  # sandboxes of this size go on booting
                self._failed.append(template.machine)
                unknown = None if isinstance(error, SandboxError) else error
                logger.warning(
                    "no snapshot of %s with %s: %s", template.name, template.machine, error, exc_info=unknown
                )
            finally:
                self._taking = False

        common = template.machine.memory_mb % COMMON_STEP_MB == 0 and template.machine not in self._failed
        if common and self._tasks is not None and not self._taking:
            self._taking = True
            self._tasks.start_soon(take, name=f"snapshot of {template.name} in another size")

    @asynccontextmanager
    async def freeze(self, lease: Lease) -> AsyncIterator[Frozen]:
        """Save the state of a machine to a new directory. The machine continues, with its clock set.

        Raises:
            CannotFreeze: the driver takes no snapshots.
            SandboxError: freezing failed; the machine continues if it can.
        """
        driver = self._driver
        if not (driver.capabilities.snapshot and isinstance(driver, SnapshotDriver)):
            raise CannotFreeze(driver.name)
        assert isinstance(lease, LocalLease), "leased by this provider"
        async with self._directory() as directory:
            with _hold_entries(lease.origin):
                with map_errors("frozen"):
                    async with _without_streams(lease) as closed:
                        await lease.agent.ping()  # answers come in order, so the channel is empty now
                        with anyio.CancelScope(shield=True):  # a cancelled snapshot could leave the machine paused
                            snapshot = await driver.snapshot(lease.machine, directory, keep=True)
                            await lease.agent.refresh(renewed(lease.identity))
                    files = _file_stamps(snapshot.path)
                host, origin = lease.host, lease.origin
                yield LocalFrozen(lease.template, host, closed, snapshot, files, origin, lease.identity)

    @asynccontextmanager
    async def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: ServeStream | None = None
    ) -> AsyncIterator[Lease]:
        """Restore a frozen state; the machine is then as ready as one from `acquire`.

        Raises:
            StateLost: the state cannot be read.
            SandboxError: no machine could be started this time.
        """
        asked_at = anyio.current_time()
        assert isinstance(frozen, LocalFrozen), "frozen by this provider"
        network = NetworkMode(frozen.identity.network)
        identity = new_identity(network=network) if copy else renewed(frozen.identity)
        spec = replace(frozen.origin.spec, id=identity.hostname, network=network)
        origin = replace(frozen.origin, spec=spec)
        source = _restore(self._driver, frozen.snapshot, spec, identity, serve_stream)
        with _hold_entries(origin):
            async with self._leased(source, partial(_check_files, frozen), origin, identity, asked_at) as lease:
                yield lease

    @asynccontextmanager
    async def _leased(
        self,
        source: AbstractAsyncContextManager[tuple[Machine, AgentClient]],
        diagnose: Callable[[], Awaitable[None]],
        origin: _Origin,
        identity: Identity,
        asked_at: float,
        *,
        cold: bool = False,
    ) -> AsyncIterator[Lease]:
        facts = await self.facts()
        async with AsyncExitStack() as stack:
            with map_errors():
                try:
                    async with self._restores:
                        began_at = anyio.current_time()
                        machine, agent = await stack.enter_async_context(source)
                        restored_at = anyio.current_time()
                except (VmmError, GuestError, OSError):
                    await diagnose()  # raises another error if the files it starts from are damaged
                    raise
            timings = LeaseTimings(queue_s=began_at - asked_at, restore_s=restored_at - began_at, cold=cold)
            yield LocalLease(
                machine=machine,
                agent=agent,
                template=origin.template,
                host=facts,
                timings=timings,
                version=origin.version,
                network=origin.spec.network,
                origin=origin,
                identity=with_device(identity, machine.device),
            )

    @asynccontextmanager
    async def _directory(self) -> AsyncIterator[Path]:
        """Create a private directory. Its name says which server it belongs to, for recovery after a crash."""
        server = of_pid(os.getpid())
        assert server is not None
        path = self._run_dir / f"{server.pid}-{server.started}-frozen-{secrets.token_hex(4)}"
        with map_errors("frozen"):
            path.mkdir(mode=0o700, parents=True)
        try:
            yield path
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(OSError):  # recovery tries again after this server has ended
                    await anyio.to_thread.run_sync(remove_tree, path)


@asynccontextmanager
async def start(
    driver: Driver,
    built: BuiltTemplate,
    identity: Identity,
    network: NetworkMode = NetworkMode.NONE,
    serve_stream: ServeStream | None = None,
    *,
    rehearse: bool = False,
) -> AsyncIterator[tuple[Machine, AgentClient]]:
    """Start a machine from its snapshot, or boot and warm it up if it has none, and make it unique.

    Raises:
        NotUnique, ClockSkew: the machine must not be used.
    """
    warmup = built.warm_up if built.snapshot is None else None
    # Virtual machines share the snapshot's memory until they write to it: they would take several times as much.
    rehearse &= warmup is None and not driver.capabilities.boots_kernel
    async with AsyncExitStack() as stack:
        machine = await stack.enter_async_context(start_machine(driver, built, built.spec(identity.hostname, network)))
        if rehearse:
            machine.prioritize(CpuPriority.BATCH)  # no caller waits for it
        stream = await machine.connect()
        identity = with_device(identity, machine.device)
        opening = open_unique(stream, identity, driver.capabilities, warmup, serve_stream, rehearse=rehearse)
        try:
            agent = await stack.enter_async_context(opening)
        except AgentGone as error:
            raise LaunchFailed(f"machine {machine.id} ended while starting: {await _exit_reason(machine)}") from error
        yield machine, agent


async def _exit_reason(machine: Machine) -> str:
    """Return why a machine ended, which its driver learns a moment after the agent is gone."""
    with anyio.move_on_after(EXIT_REASON_S):
        return str(await machine.wait())
    return "its agent closed the stream"


def start_machine(driver: Driver, built: BuiltTemplate, spec: MachineSpec) -> AbstractAsyncContextManager[Machine]:
    """Start a machine without greeting its agent."""
    if built.snapshot is None:
        return driver.launch(spec)
    assert isinstance(driver, SnapshotDriver)  # or the template's build would have no snapshot
    return driver.restore(built.snapshot, spec)


@asynccontextmanager
async def _restore(
    driver: Driver, snapshot: Snapshot, spec: MachineSpec, identity: Identity, serve_stream: ServeStream | None
) -> AsyncIterator[tuple[Machine, AgentClient]]:
    assert isinstance(driver, SnapshotDriver)  # it froze the machine
    async with AsyncExitStack() as stack:
        try:
            machine = await stack.enter_async_context(driver.restore(snapshot, spec))
        except SnapshotFailed as error:
            raise StateLost(str(error)) from error
        stream = await machine.connect()
        identity = with_device(identity, machine.device)
        opening = open_unique(stream, identity, driver.capabilities, serve_stream=serve_stream)
        yield machine, await stack.enter_async_context(opening)


@asynccontextmanager
async def _without_streams(lease: LocalLease) -> AsyncIterator[int]:
    """End the streams of a machine; yields how many. The block refreshes it, and then it may open streams again."""
    if lease.network is not NetworkMode.PROXY:
        yield 0
        return
    try:
        yield await lease.agent.close_streams()
    except BaseException:  # the machine goes on, with its network
        with anyio.move_on_after(REOPEN_S, shield=True), suppress(GuestError):
            await lease.agent.refresh(renewed(lease.identity))
        raise


def _file_stamps(directory: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file. Raises OSError: a listing that is cut short looks like files that are gone."""

    def fail(error: OSError) -> None:
        raise error

    stamps = {}
    for folder, _, names in os.walk(directory, onerror=fail):
        for path in (Path(folder, name) for name in names):
            status = path.lstat()
            stamps[str(path.relative_to(directory))] = (status.st_size, status.st_mtime_ns)
    return stamps


async def _check_files(frozen: LocalFrozen) -> None:
    """Raise StateLost if the files of a frozen state are not as they were written."""
    try:
        found = _file_stamps(frozen.snapshot.path)
    except (FileNotFoundError, NotADirectoryError):
        found = {}
    if found != frozen.files:
        raise StateLost("its files have been changed or removed")


@contextmanager
def _hold_entries(origin: _Origin) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(origin.entries))
        except FileNotFoundError as error:
            raise StateLost(f"{error.filename}, which it was started from, is gone") from error
        yield
