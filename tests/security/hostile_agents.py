"""Real machines whose agent belongs to the attacker, beside honest ones in the same service.

Code cannot become the agent of its machine. The host assumes all the same that it has, so these machines start with an
agent that executes the code of a run itself, with the channel to the host in its hands.
"""

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from mcp_sandbox.app import Host
from mcp_sandbox.commands.bench.hostile_agent import DONE as DONE
from mcp_sandbox.commands.bench.hostile_agent import pack_hostile_agent as pack_hostile_agent
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.machines.provider import Lease, MachineRequest
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunView
from templates.build import BuiltTemplate
from templates.model import MachineSize
from vmm.types import GuestCode

ATTACKER, NEIGHBOUR = "attacker", "neighbour"


class HostileBuilds(Builds):
    """Builds whose machines start with the attacker's agent."""

    archive: Path

    async def hold(self, name: str, stack: ExitStack, size: MachineSize | None = None) -> BuiltTemplate:
        built = await super().hold(name, stack, size)
        return replace(built, boot=GuestCode(self.archive), snapshot=None)


class InfiltratedProvider(LocalProvider):
    """A provider that gives the attacker machines with a hostile agent."""

    def __init__(self, host: Host, archive: Path) -> None:
        builds = Builds(host.driver, host.builder, host.settings.catalogue)
        super().__init__(host.driver, builds, max_restores=4, run_dir=host.settings.run_dir)
        hostile = HostileBuilds(host.driver, host.builder, host.settings.catalogue)
        hostile.archive = archive
        self._hostile = LocalProvider(host.driver, hostile, max_restores=4, run_dir=host.settings.run_dir)

    @asynccontextmanager
    async def acquire(self, request: MachineRequest) -> AsyncIterator[Lease]:
        source = self._hostile.acquire(request) if request.owner == ATTACKER else super().acquire(request)
        async with source as lease:
            yield lease


@asynccontextmanager
async def infiltrated_service(host: Host, archive: Path) -> AsyncIterator[SandboxService]:
    """A service whose attacker has hostile agents."""
    pack_hostile_agent(archive)
    async with SandboxService(InfiltratedProvider(host, archive), host.settings) as service:
        yield service


class Owner:
    """One owner with one sandbox."""

    def __init__(self, service: SandboxService, name: str, sandbox_id: str) -> None:
        self.service = service
        self.name = name
        self.id = sandbox_id

    async def run(self, code: str) -> RunView:
        return await self.service.run(CodeRun(self.name, code, self.id))


@asynccontextmanager
async def sandbox_of(service: SandboxService, owner: str) -> AsyncIterator[Owner]:
    """A sandbox for as long as the block lasts."""
    view = await service.create(owner)
    try:
        yield Owner(service, owner, view.sandbox_id)
    finally:
        await service.close(owner, view.sandbox_id)


@contextmanager
def growth_at_most(megabytes: int) -> Iterator[None]:
    """Check that this process, which is the server here, keeps no more memory after the block than before."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    yield
    gc.collect()
    grown = (process.memory_info().rss - before) / 2**20
    assert grown <= megabytes, f"the server has grown by {grown:.0f} MB"
