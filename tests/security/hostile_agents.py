"""Real machines whose agent belongs to the attacker, beside honest ones in the same service.

Code cannot become the agent of its machine. The host assumes all the same that it has, so these machines start with an
agent that executes the code of a run itself, with the channel to the host in its hands.
"""

import gc
import io
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from mcp_sandbox.app import Host
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.machines.provider import Lease, MachineRequest
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunView
from templates.build import BuiltTemplate
from templates.guest_code import pack_agent
from vmm.types import GuestCode

ATTACKER, NEIGHBOUR = "attacker", "neighbour"

# Ends a run.
DONE = """send({"ok": True, "status": "ok", "state": "kept", "exit_code": 0, "duration_ns": 1, "output":
    {"stdout_bytes": 0, "stderr_bytes": 0, "spill_complete": True, "displays_dropped": 0}})
"""

# The honest agent but for two requests. What a run executes finds the channel in `raw` and `send`.
HOSTILE_MAIN = """
import os
from functools import partial

from guest.agent.requests import Agent
from guest.agent.user import User
from guest.protocol import encode

pipes = os.dup(0), os.dup(1)

def raw(data):
    view = memoryview(data)
    while view:
        view = view[os.write(pipes[1], view):]

def send(request, header, body=b""):
    raw(encode({"id": request, **header}, body))

def run(header, body):
    os.set_blocking(pipes[1], True)
    names = {"agent": agent, "encode": encode, "raw": raw, "send": partial(send, header["id"]), "id": header["id"]}
    exec(body.decode(), names)
    os.set_blocking(pipes[1], False)

agent = Agent(User(None, None))
agent._operations["warm"] = lambda header, body: agent._answer(header["id"], {})
agent._operations["run"] = run
agent.serve_pipes(pipes)
"""


def pack_hostile_agent(archive: Path, *, first: str = "") -> None:
    """Write the archive of an agent that executes the code of runs itself, and some code before it greets its host."""
    main = HOSTILE_MAIN.replace("agent = ", f"{first}\nagent = ", 1).encode()
    packed = io.BytesIO(pack_agent())
    with tarfile.open(fileobj=packed, mode="a") as tar:
        file = tarfile.TarInfo("guest/agent/__main__.py")  # the last file of this name counts
        file.size, file.mode = len(main), 0o644
        tar.addfile(file, io.BytesIO(main))
    archive.write_bytes(packed.getvalue())


class HostileBuilds(Builds):
    """Builds whose machines start with the attacker's agent."""

    archive: Path

    async def hold(self, name: str, stack: ExitStack) -> BuiltTemplate:
        built = await super().hold(name, stack)
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
