"""Many sandboxes one after the other: what a server has must not grow with them."""

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

import anyio.to_thread

from mcp_sandbox.commands.bench.results import Findings, Promise
from mcp_sandbox.commands.bench.server import BenchServer, open_server
from mcp_sandbox.commands.bench.subject import Subject
from mcp_sandbox.config import Settings
from mcp_sandbox.processes import PROC, tree_of
from vmm.hierarchy import detect

WARM_UP = 20  # cycles after which a server has loaded and cached all that it will
CYCLES = {"gvisor": 1000}
OTHERS_CYCLES = 200
READY = 1


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a server has of the host, seen from outside. Field names are shown to people."""

    processes: int
    threads: int
    descriptors: int
    control_groups: int
    files: int
    server_kb: int


async def measure(subject: Subject) -> Findings:
    """Create, run and close, over and over; the server's holdings early on and at the end."""
    cycles = subject.plan.cycles or CYCLES.get(subject.driver.name, OTHERS_CYCLES)
    async with open_server(subject.settings, {"pool.min": READY, "pool.max": READY}) as server:
        await _cycles(subject, server, WARM_UP, "soak, warming up")
        before = await _holdings(server, subject.settings)
        await _cycles(subject, server, cycles, "soak")
        after = await _holdings(server, subject.settings)
    return Findings(promises=growth(before, after, cycles))


def growth(before: Holdings, after: Holdings, cycles: int) -> list[Promise]:
    """Nothing may become more, only memory by a little."""
    promises = []
    for field in fields(Holdings):
        early, late = getattr(before, field.name), getattr(after, field.name)
        text = f"{cycles} times create, run, close: {field.name.replace('_', ' ')}, from {early:,} to {late:,}"
        if field.name == "server_kb":
            promises.append(Promise(text, 100 * (late / early - 1), 5, "% more"))
        else:
            promises.append(Promise(text, late - early, 0, "more"))
    return promises


async def _cycles(subject: Subject, server: BenchServer, count: int, title: str) -> None:
    for number in range(count):
        subject.tell(f"{title}: {number} of {count}")
        sandbox = await server.create()
        await server.run(sandbox)
        await server.close(sandbox)


async def _holdings(server: BenchServer, settings: Settings) -> Holdings:
    await server.settled(READY)
    return await anyio.to_thread.run_sync(_look, server, settings.home)


def _look(server: BenchServer, home: Path) -> Holdings:
    process = server.process
    status = (PROC / str(process.pid) / "status").read_text()
    groups = [folder.glob(f"{process.pid}-{process.started}-*") for folder in detect().folders]
    return Holdings(
        processes=len(tree_of(process.pid)),
        threads=_field(status, "Threads"),
        descriptors=len(list((PROC / str(process.pid) / "fd").iterdir())),
        control_groups=sum(len(list(found)) for found in groups),
        files=sum(len(names) for _, _, names in os.walk(home)),
        server_kb=_field(status, "VmRSS"),
    )


def _field(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    assert found is not None, "the kernel always says it"
    return int(found[1])
