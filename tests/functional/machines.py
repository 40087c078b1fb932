"""Real machines for tests: driver → built template → clone → its agent.

One factory owns all machines of a driver and proves that none survives its test: no process, cgroup, mount, file or
open descriptor is left.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import anyio
import psutil
import pytest

from guest.client import AgentClient
from guest.client.messages import Artifact, Display, Finished, RunCode, RunKind
from guest.client.streams import ServeStream
from mcp_sandbox.app import Host, open_host
from mcp_sandbox.commands.selftest.subject import Subject, open_subject
from mcp_sandbox.config import load_settings
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider, start, start_machine
from mcp_sandbox.machines.provider import HostFacts, Lease, LeasedMachine, MachineRequest
from mcp_sandbox.machines.unique import new_identity
from mcp_sandbox.runs.results import Fold, HeadTail
from mcp_sandbox.views import StreamView
from templates.build import BuiltTemplate
from templates.model import MachineSize
from tests.footprint import (
    assert_gone,
    assert_no_more_empty_groups,
    descriptors,
    empty_groups,
    groups_of,
    mounts,
)
from tests.waiting import HANG_S
from vmm.driver import DRIVERS, Machine
from vmm.types import DiskRate, NetworkMode

if TYPE_CHECKING:
    from pathlib import Path

SHOWN_BYTES = 16 * 1024
UNLIMITED = DiskRate()


@runtime_checkable
class HasPid(Protocol):
    """A machine that is a process of this host."""

    @property
    def pid(self) -> int: ...


def pid_of(machine: LeasedMachine) -> int:
    assert isinstance(machine, HasPid)
    return machine.pid


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one run."""

    end: Finished
    stdout: StreamView
    stderr: StreamView
    displays: tuple[Display, ...]
    artifacts: tuple[Artifact, ...]

    @property
    def out(self) -> str:
        """All of stdout, if the code succeeded and printed little."""
        assert self.end.status == "ok", self.end.error or self.end
        assert not self.stdout.omitted_bytes
        return self.stdout.head.strip()


async def run(
    agent: AgentClient,
    code: str,
    *,
    kind: RunKind = "code",
    stop_after_s: float | None = None,
    grace_s: float = 2.0,
    keep_processes: bool = False,
) -> Ran:
    """Run code or a command to its end, or stop it after a while."""
    fold = Fold(HeadTail(SHOWN_BYTES, SHOWN_BYTES), HeadTail(SHOWN_BYTES, SHOWN_BYTES))
    request = RunCode(
        code,
        kind,
        grace_s=grace_s,
        head_bytes=SHOWN_BYTES,
        tail_bytes=SHOWN_BYTES,
        keep_processes=keep_processes,
    )
    with anyio.fail_after(HANG_S):
        async with agent.run(request) as running:
            with anyio.move_on_after(stop_after_s):
                async for event in running:
                    fold.add(event)
            if running.finished is None:
                await running.stop()
                async for event in running:
                    fold.add(event)
    assert fold.finished is not None
    output = fold.finished.output
    return Ran(
        fold.finished,
        fold.stdout.captured(output.stdout_spill),
        fold.stderr.captured(output.stderr_spill),
        tuple(fold.displays),
        tuple(fold.artifacts.values()),
    )


@dataclass(frozen=True, slots=True)
class Clone:
    """A restored machine and its agent."""

    machine: Machine
    agent: AgentClient

    @property
    def pid(self) -> int:
        return pid_of(self.machine)

    async def run(self, code: str, *, stop_after_s: float | None = None, grace_s: float = 2.0) -> Ran:
        return await run(self.agent, code, stop_after_s=stop_after_s, grace_s=grace_s)

    async def command(
        self, line: str, *, stop_after_s: float | None = None, grace_s: float = 2.0, keep_processes: bool = False
    ) -> Ran:
        return await run(
            self.agent,
            line,
            kind="command",
            stop_after_s=stop_after_s,
            grace_s=grace_s,
            keep_processes=keep_processes,
        )


class Machines:
    """Starts machines with one driver and remembers all of them."""

    def __init__(self, host: Host, built: BuiltTemplate) -> None:
        self.host = host
        self.built = built
        self._processes: set[psutil.Process] = set()
        self._groups: set[Path] = set()

    @asynccontextmanager
    async def clone(
        self,
        network: NetworkMode = NetworkMode.NONE,
        serve: ServeStream | None = None,
        *,
        rehearse: bool = False,
    ) -> AsyncIterator[Clone]:
        """Start a machine and greet its agent, as the product does: warm, unique, each step with a deadline."""
        identity = new_identity(_new_name(), network)
        source = start(self.host.driver, self.built, identity, network, serve, rehearse=rehearse)
        async with source as (machine, agent):
            self._note(machine)
            yield Clone(machine, agent)

    @asynccontextmanager
    async def restored(self) -> AsyncIterator[Machine]:
        """Start a machine without greeting its agent: from the snapshot, if there is one."""
        async with start_machine(self.host.driver, self.built, self.built.spec(_new_name())) as machine:
            self._note(machine)
            yield machine

    @asynccontextmanager
    async def booted(self, disk_rate: DiskRate = UNLIMITED) -> AsyncIterator[Machine]:
        """Boot a machine without a snapshot, as template builds do."""
        spec = replace(self.built.spec(_new_name()), disk_rate=disk_rate)
        async with self.host.driver.launch(spec) as machine:
            self._note(machine)
            yield machine

    @asynccontextmanager
    async def leased(
        self,
        network: NetworkMode = NetworkMode.NONE,
        serve: ServeStream | None = None,
        size: MachineSize | None = None,
    ) -> AsyncIterator[Lease]:
        """Acquire a machine as the service does."""
        request = MachineRequest(self.built.template.name, size=size, network=network, serve_stream=serve)
        async with self.provider().acquire(request) as lease:
            self._note(lease.machine)
            yield lease

    def provider(self) -> LocalProvider:
        """The provider that the service gets its machines from."""
        host = self.host
        builds = Builds(host.driver, host.builder, host.settings.catalogue)
        return LocalProvider(host.driver, builds, max_restores=4, run_dir=host.settings.run_dir)

    async def assert_none_left(self) -> None:
        """Check that nothing is left of any machine started here."""
        await assert_gone(self._processes, self._groups, self.host.settings.run_dir)
        self._processes.clear()
        self._groups.clear()

    def _note(self, machine: LeasedMachine) -> None:
        first = psutil.Process(pid_of(machine))
        self._processes.update((first, *first.children(recursive=True)))
        self._groups.update(groups_of(first.pid))


def _new_name() -> str:
    return f"test-{secrets.token_hex(4)}"


# -- fixtures, for the conftest.py files of packages that use real machines ---------------------------------


def only(*drivers: str) -> pytest.MarkDecorator:
    """Run a test with these drivers only."""
    return pytest.mark.parametrize("host", drivers, indirect=True)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One event loop for the whole session, for fixtures that live that long."""
    return "asyncio"


@asynccontextmanager
async def open_driver(name: str) -> AsyncIterator[Host]:
    """This host with one of its drivers; the test is skipped if the driver cannot be used here."""
    async with open_host(load_settings(driver=name), fetch=True) as host:
        verdict = host.choice.verdict
        if not verdict.usable:
            pytest.skip(f"{host.driver.name}: {verdict.reason}")
        yield host


@pytest.fixture(scope="package", params=list(DRIVERS))
async def host(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Host]:
    """This host with each of its drivers."""
    async with open_driver(request.param) as host:
        yield host


@pytest.fixture(scope="session")
async def in_force(anyio_backend: str) -> HostFacts:
    """The driver that a server of this host uses by default, with the template built.

    For tests of what does not depend on the driver.
    """
    async with open_host(load_settings(), fetch=True) as host:
        if host.facts is None:
            pytest.skip(f"{host.driver.name}: {host.choice.verdict.reason}")
        await host.builder.build(host.settings.catalogue.load(host.settings.template), host.driver)
        return host.facts


@pytest.fixture(scope="package")
async def built(host: Host, anyio_backend: str) -> BuiltTemplate:
    """The template all tests use, built if it has to be."""
    return await host.builder.build(host.settings.catalogue.load(host.settings.template), host.driver)


@pytest.fixture(scope="package")
async def loaded(host: Host, built: BuiltTemplate, anyio_backend: str) -> Machines:
    """A factory whose driver has the snapshot's memory at hand: it keeps that until it is closed."""
    machines = Machines(host, built)
    async with machines.clone():
        pass
    await machines.assert_none_left()
    return machines


@pytest.fixture(scope="module")
async def shared(loaded: Machines, anyio_backend: str) -> AsyncIterator[Clone]:
    """One machine for all tests of a file that leave it as it was."""
    factory = Machines(loaded.host, loaded.built)
    async with factory.clone() as clone:
        yield clone
    await factory.assert_none_left()


@pytest.fixture(scope="module")
async def subject(host: Host, built: BuiltTemplate, anyio_backend: str) -> AsyncIterator[Subject]:
    """The sandboxes of a driver as `mcp-sandbox selftest` has them."""
    async with open_subject(host) as subject:
        yield subject


@pytest.fixture
async def machines(loaded: Machines) -> AsyncIterator[Machines]:
    """A separate factory for one test, which checks that nothing of its machines is left."""
    before, children, groups, mounted = descriptors(), psutil.Process().children(), empty_groups(), mounts()
    factory = Machines(loaded.host, loaded.built)
    yield factory
    await factory.assert_none_left()
    await assert_no_more_empty_groups(groups)
    assert mounts() == mounted, "a file system is left"
    assert descriptors() == before, "open files are left"
    assert psutil.Process().children() == children, "a process is left"


@pytest.fixture
async def clone(machines: Machines) -> AsyncIterator[Clone]:
    """A fresh machine."""
    async with machines.clone() as clone:
        yield clone
