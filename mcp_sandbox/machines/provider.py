"""The contract of everything that supplies machines: a provider turns a request into a lease."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import anyio
from anyio import AsyncContextManagerMixin

from mcp_sandbox.errors import UnknownTemplate, UnusableTemplate
from templates.catalogue import Catalogue
from templates.errors import InvalidTemplate
from templates.errors import UnknownTemplate as NoSuchTemplate
from templates.model import MachineSize, Template
from vmm.driver import DRIVERS, driver_info
from vmm.types import Accel, CpuPriority, Exit, Isolation, NetworkMode, Usage

if TYPE_CHECKING:  # a server that starts describes its host before it needs these
    from guest.client import AgentClient
    from guest.client.messages import Identity
    from guest.client.streams import ServeStream

LEVELS = {
    Isolation.VM: "every sandbox is a virtual machine with its own kernel",
    Isolation.KERNEL: "every sandbox has an application kernel between its code and the host's kernel",
    Isolation.NAMESPACE: "sandboxes share the host's kernel, the weakest level",
}
CPUS = {Accel.KVM: "KVM", Accel.TCG: "emulated CPU: many times slower", None: "native CPU"}


@dataclass(frozen=True, slots=True)
class MachineRequest:
    """What a caller wants from a provider."""

    template: str
    owner: str | None = None  # None: started ahead of any request, so the owner is not known yet
    size: MachineSize | None = None  # None: the template's
    network: NetworkMode = NetworkMode.NONE
    serve_stream: "ServeStream | None" = None  # serves the streams of a machine in mode `proxy`
    rehearse: bool = False  # it will wait before it is used, so it may take longer to start

    def __post_init__(self) -> None:
        assert (self.network is NetworkMode.PROXY) is (self.serve_stream is not None), "streams need a server"

    def is_standard(self, template: Template) -> bool:
        """Whether any unused machine of `template` satisfies the request, one that was started ahead included.

        A machine that waits is offline. It can get streams when it is leased, but no device.
        """
        return self.size in (None, template.machine) and self.network is not NetworkMode.NAT


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A host, and what it puts between a sandbox's code and itself."""

    driver: str
    isolation: Isolation
    accel: Accel | None
    missing_protections: tuple[str, ...] = ()  # one sentence each
    name: str = "local"

    def __str__(self) -> str:
        title = driver_info(self.driver).title if self.driver in DRIVERS else self.driver
        missing = f"; not in force: {'; '.join(self.missing_protections)}" if self.missing_protections else ""
        return f"{self.isolation} ({title}, {CPUS[self.accel]}): {LEVELS[self.isolation]}{missing}"


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    """How long it took to get a machine."""

    queue_s: float
    restore_s: float
    cold: bool = False  # it was booted, because there was no snapshot of its size


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many machines a provider's hosts can run at once; None: no limit but those of the settings."""

    machines: int | None = None
    memory_mb: int | None = None


UNLIMITED = Capacity()


class CapacityFeed:
    """The capacity of a provider, and its changes."""

    def __init__(self, now: Capacity = UNLIMITED) -> None:
        self.now = now
        self._changed = anyio.Event()

    def update(self, capacity: Capacity) -> None:
        """Set the capacity and tell all readers."""
        self.now = capacity
        self._changed.set()
        self._changed = anyio.Event()

    async def __aiter__(self) -> AsyncIterator[Capacity]:
        """Yield the capacity now and whenever it has changed. A slow reader sees only the latest one."""
        while True:
            changed = self._changed
            yield self.now
            await changed.wait()


class LeasedMachine(Protocol):
    """What a caller may know of a leased machine. It may run on another host."""

    @property
    def id(self) -> str: ...

    def prioritize(self, priority: CpuPriority) -> None:
        """Set how much CPU the machine gets, as far as its host can. Does not wait."""
        ...

    async def pause(self) -> None:
        """Let the machine stand still, so that it uses no CPU. Its clocks run on.

        Raises:
            VmmError, HostLost: it has ended.
        """
        ...

    async def resume(self) -> None:
        """Let a paused machine run again."""
        ...

    async def usage(self) -> Usage:
        """Measure what the machine takes from its host.

        Raises:
            VmmError, HostLost: it has ended.
        """
        ...

    async def wait(self) -> Exit:
        """Return how the machine ended, once it has.

        Raises:
            HostLost: it ended because its host is gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """A machine that belongs to one caller: restored, unique, greeted. It ends with the context that yielded it."""

    machine: LeasedMachine
    agent: "AgentClient"
    template: Template
    host: HostFacts
    timings: LeaseTimings
    identity: "Identity"  # what its agent was refreshed with
    version: str = ""  # of the template's build: see Supply
    network: NetworkMode = NetworkMode.NONE


@dataclass(frozen=True, slots=True)
class Frozen:
    """The saved state of a machine. It is removed with the context that yielded it."""

    template: Template
    host: HostFacts
    closed_streams: int  # that were open when the machine was frozen


def find_template(catalogue: Catalogue, name: str) -> Template:
    """Return the definition of a template.

    Raises:
        UnknownTemplate: no template has this name.
        UnusableTemplate: its definition has errors.
    """
    try:
        return catalogue.load(name)
    except NoSuchTemplate:
        raise UnknownTemplate(name, catalogue.names()) from None
    except InvalidTemplate as error:
        raise UnusableTemplate(name, str(error)) from None


class Supply(Protocol):
    """The builds that one host starts machines from. They may differ from host to host, and change at any time.

    A pool belongs to one host and its supply. A provider over several hosts chooses between their pools.
    """

    def templates(self) -> Mapping[str, Template]:
        """Return all templates, built or not."""
        ...

    async def version(self, template: str) -> str:
        """Return the version of the build that the next machine would start from. Fast while nothing changes.

        Raises:
            SandboxError: no machine could be started.
        """
        ...


class Provider(Protocol):
    """A source of machines, open as long as its context. All leases end before it does."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def capacity(self) -> CapacityFeed: ...

    def acquire(self, request: MachineRequest) -> AbstractAsyncContextManager[Lease]:
        """Lease a machine that was never used before.

        Raises:
            NoHost: no host can run such a machine, or none can now.
            HostLost: the host was lost while the machine started.
            SandboxError: the machine could not be started.
        """
        ...

    def freeze(self, lease: Lease) -> AbstractAsyncContextManager[Frozen]:
        """Save the state of a machine, which then continues. Its agent must be idle meanwhile, and its streams end.

        The context may be left in any task and in any order: machines come and go while it lasts.
        """
        ...

    def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: "ServeStream | None" = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Lease a machine that continues from a saved state: as the same machine, or as a copy made unique again.

        It has the network mode that it was frozen with. In mode `proxy`, `serve_stream` serves its streams.

        Raises:
            StateLost: the state is damaged.
            HostLost: a host was lost. If it is the state's host, the state is lost too.
            SandboxError: the machine could not be started this time.
        """
        ...


class ProviderLayer(AsyncContextManagerMixin):
    """A provider that hands everything on to another one. Subclasses override what they change."""

    def __init__(self, source: Provider) -> None:
        self._source = source

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncIterator[Self]:
        async with self._source:
            yield self

    @property
    def capacity(self) -> CapacityFeed:
        """The capacity of the source."""
        return self._source.capacity

    def acquire(self, request: MachineRequest) -> AbstractAsyncContextManager[Lease]:
        """Lease a machine from the source."""
        return self._source.acquire(request)

    def freeze(self, lease: Lease) -> AbstractAsyncContextManager[Frozen]:
        """Save the state of a machine."""
        return self._source.freeze(lease)

    def thaw(
        self, frozen: Frozen, *, copy: bool, serve_stream: "ServeStream | None" = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Lease a machine that continues from a saved state."""
        return self._source.thaw(frozen, copy=copy, serve_stream=serve_stream)
