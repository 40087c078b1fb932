"""Many sandboxes one after the other: what a server has must not grow with them."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

import anyio.to_thread
import psutil

from mcp_sandbox.commands.bench.results import Findings, Promise
from mcp_sandbox.commands.bench.server import BenchServer, open_server
from mcp_sandbox.commands.bench.subject import Subject
from mcp_sandbox.config import Settings
from vmm.hierarchy import detect
from vmm.process_table import tree_of

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
    seen = psutil.Process(process.pid)
    groups = [folder.glob(f"{process.pid}-{process.started}-*") for folder in detect().folders]
    return Holdings(
        processes=len(tree_of(process.pid)),
        threads=seen.num_threads(),
        descriptors=seen.num_fds(),
        control_groups=sum(len(list(found)) for found in groups),
        files=sum(len(names) for _, _, names in os.walk(home)),
        server_kb=seen.memory_info().rss // 1024,
    )
