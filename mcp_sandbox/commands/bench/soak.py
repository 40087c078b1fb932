"""Many sandboxes in sequence: the resources of a server must not grow with their number."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

import anyio.to_thread
import psutil

from mcp_sandbox.commands.bench.results import Findings, Promise
from mcp_sandbox.commands.bench.server import BenchServer, open_server, pool_of
from mcp_sandbox.commands.bench.subject import Subject
from mcp_sandbox.config import Settings
from vmm.hierarchy import detect
from vmm.process_table import tree_of

WARM_UP = 20  # cycles after which a server's caches are full
CYCLES = {"gvisor": 1000}
DEFAULT_CYCLES = 200
READY = 1


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of the host that a server uses. The field names appear in the report."""

    processes: int
    threads: int
    descriptors: int
    cgroups: int
    files: int
    server_kb: int


async def measure(subject: Subject) -> Findings:
    """Create, run and close sandboxes, and compare the server's resources after the warm-up with those at the end."""
    cycles = subject.plan.cycles or CYCLES.get(subject.driver.name, DEFAULT_CYCLES)
    async with open_server(subject.settings, pool_of(subject, READY)) as server:
        await server.fill_pool(READY)
        await _cycles(subject, server, WARM_UP, "soak, warming up")
        before = await _resources(server, subject.settings)
        await _cycles(subject, server, cycles, "soak")
        after = await _resources(server, subject.settings)
    return Findings(promises=growth(before, after, cycles))


def growth(before: Resources, after: Resources, cycles: int) -> list[Promise]:
    """Return the promises: no resource grows, except memory by a little."""
    promises = []
    for field in fields(Resources):
        early, late = getattr(before, field.name), getattr(after, field.name)
        text = f"{cycles} times create, run, close: {field.name.replace('_', ' ')}, from {early:,} to {late:,}"
        if field.name == "server_kb":
            promises.append(Promise(text, 100 * (late / early - 1), 5, "% more"))
        else:
            promises.append(Promise(text, late - early, 0, "more"))
    return promises


async def _cycles(subject: Subject, server: BenchServer, count: int, title: str) -> None:
    for number in range(count):
        subject.progress(f"{title}: {number} of {count}")
        sandbox = await server.create()
        await server.run(sandbox)
        await server.close(sandbox)


async def _resources(server: BenchServer, settings: Settings) -> Resources:
    await server.wait_idle(READY)
    return await anyio.to_thread.run_sync(_count, server, settings.home)


def _count(server: BenchServer, home: Path) -> Resources:
    process = server.process
    seen = psutil.Process(process.pid)
    groups = [folder.glob(f"{process.pid}-{process.started}-*") for folder in detect().folders]
    return Resources(
        processes=len(tree_of(process.pid)),
        threads=seen.num_threads(),
        descriptors=seen.num_fds(),
        cgroups=sum(len(list(found)) for found in groups),
        files=sum(len(names) for _, _, names in os.walk(home)),
        server_kb=seen.memory_info().rss // 1024,
    )
