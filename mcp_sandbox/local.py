"""Machines of this host: started from their template the moment somebody asks."""

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager

import anyio
from anyio.abc import ByteStream

from guest.client import AgentClient
from guest.client.messages import Identity, Refreshed
from guest.errors import GuestError
from mcp_sandbox.errors import HostNotReady, SandboxError, TemplateNotBuilt, UnknownTemplate
from mcp_sandbox.files import FILE_TIMEOUT_S
from mcp_sandbox.provider import HostFacts, Lease, LeaseTimings
from templates.build import Builder, BuiltTemplate
from templates.errors import TemplateError
from templates.errors import UnknownTemplate as NoSuchTemplate
from templates.model import find_templates, load_template
from templates.snapshot import WARM_TIMEOUT_S
from vmm.driver import Driver, Machine, SnapshotDriver
from vmm.errors import DriverUnavailable, VmmError
from vmm.types import Isolation

AGENT_TIMEOUT_S = FILE_TIMEOUT_S + 10.0  # who asks gives up sooner and may try again: this is for a wire that is dead
MAX_CLOCK_SKEW_S = 1.0  # certificates, caches and logs start to go wrong beyond
CLOCK_TRIES = 3  # after the first one, which is slow: the guest runs its code for the first time
ENTROPY_BYTES = 64  # twice what the kernel's generator holds


class LocalProvider:
    """Starts machines with one driver, a few at a time."""

    def __init__(self, driver: Driver, builder: Builder, *, max_restores: int) -> None:
        self._driver = driver
        self._builder = builder
        self._restores = anyio.CapacityLimiter(max_restores)
        self._probing = anyio.Lock()
        self._facts: HostFacts | None = None
        self._built: dict[str, BuiltTemplate] = {}  # looking one up hashes files: too slow for every restore

    async def facts(self) -> HostFacts:
        """What this host offers. The first call probes it, which can take seconds.

        Raises:
            HostNotReady: no machine can be started here.
        """
        async with self._probing:
            if self._facts is None:
                with _mapped():
                    verdict = await self._driver.probe()
                if not verdict.usable:
                    raise HostNotReady(verdict.reason, verdict.fix)
                isolation = self._driver.capabilities.isolation
                self._facts = HostFacts(self._driver.name, isolation, verdict.accel, verdict.limits)
            return self._facts

    @asynccontextmanager
    async def acquire(self, template: str) -> AsyncIterator[Lease]:
        """A machine of `template`: its own entropy, clock and identity, and its agent has answered.

        Raises:
            UnknownTemplate, TemplateNotBuilt, HostNotReady, SandboxError: there is no machine.
        """
        asked_at = anyio.current_time()
        facts = await self.facts()
        built = await self._find(template)
        name = f"sandbox-{secrets.token_hex(4)}"
        async with AsyncExitStack() as stack:
            async with self._restores:
                began_at = anyio.current_time()
                with _mapped():
                    machine, agent = await stack.enter_async_context(start(self._driver, built, name))
                restored_at = anyio.current_time()
            timings = LeaseTimings(queue_s=began_at - asked_at, restore_s=restored_at - began_at)
            yield Lease(machine, agent, built.template, facts, timings)

    async def _find(self, name: str) -> BuiltTemplate:
        try:
            template = load_template(name)
        except NoSuchTemplate:
            raise UnknownTemplate(name, sorted(find_templates())) from None
        known = self._built.get(name)
        if known is not None and known.template == template and known.is_there():
            return known
        with _mapped():
            built = await self._builder.find(template, self._driver)
        if built is None:
            raise TemplateNotBuilt(name)
        self._built[name] = built
        return built


@asynccontextmanager
async def start(driver: Driver, built: BuiltTemplate, name: str) -> AsyncIterator[tuple[Machine, AgentClient]]:
    """A machine that is warm and unique, and its agent: from the snapshot, or from nothing where there is none.

    Raises:
        SandboxError: it is not unique, or its clock cannot be set right.
    """
    async with start_machine(driver, built, name) as machine:
        stream = await machine.connect()
        warmup = built.template.warmup.code if built.snapshot is None else None
        async with open_unique(stream, name, driver.capabilities.isolation, warmup) as agent:
            yield machine, agent


def start_machine(driver: Driver, built: BuiltTemplate, name: str) -> AbstractAsyncContextManager[Machine]:
    """A machine that nobody has spoken to yet."""
    if built.snapshot is None:
        return driver.launch(built.spec(name))
    assert isinstance(driver, SnapshotDriver)  # as its capabilities said when the template was built
    return driver.restore(built.snapshot, built.spec(name))


@asynccontextmanager
async def open_unique(
    stream: ByteStream, hostname: str, isolation: Isolation, warmup: str | None = None
) -> AsyncIterator[AgentClient]:
    """Greet a clone and give it its own entropy, clock and identity: until then it is the twin of every other clone.

    With `warmup`, a machine that was not warm yet is warmed up with that code first.

    Raises:
        SandboxError: it is not unique, or its clock cannot be set right.
    """
    identity = Identity(hostname=hostname, machine_id=secrets.token_hex(16), entropy=os.urandom(ENTROPY_BYTES))
    async with AgentClient.open(stream, timeout_s=AGENT_TIMEOUT_S, identity=identity) as agent:
        if warmup is not None:
            await agent.warm(warmup, timeout_s=WARM_TIMEOUT_S)
            agent.refreshed = await agent.refresh(identity)  # a warm-up rehearses being unique, under another name
        refreshed = await _on_time(agent, identity)
        if isolation is Isolation.VM and not (refreshed.entropy_credited and refreshed.hostname_set):
            # Only a kernel frozen with the snapshot can be a twin; elsewhere the host's own one gives entropy.
            what = "name" if refreshed.entropy_credited else "entropy"
            raise SandboxError(f"The new sandbox got no {what} of its own, so it was not handed out. Try again.")
        if abs(refreshed.clock_skew_s) > MAX_CLOCK_SKEW_S:
            skew = f"{refreshed.clock_skew_s:.1f} s"
            raise SandboxError(f"The new sandbox's clock is off by {skew}, so it was not handed out. Try again.")
        yield agent


async def _on_time(agent: AgentClient, identity: Identity) -> Refreshed:
    """What came of the refresh, once it was quick enough: a clock set by a request that was long on its way is late."""
    refreshed = agent.refreshed
    assert refreshed is not None  # it was opened with an identity
    for _ in range(CLOCK_TRIES):
        if abs(refreshed.clock_skew_s) <= MAX_CLOCK_SKEW_S / 2:
            break
        refreshed = await agent.refresh(identity)
    return refreshed


@contextmanager
def _mapped() -> Iterator[None]:
    """Other rooms' errors as this room's."""
    try:
        yield
    except DriverUnavailable as error:
        raise HostNotReady(str(error), error.fix) from error
    except (VmmError, GuestError, TemplateError, OSError) as error:
        raise SandboxError(
            f"The sandbox could not be started: {error}. Try again; if it stays so, `mcp-sandbox doctor` tells more."
        ) from error
