"""What the pool is good for: a sandbox at once, and a burst of requests served hardly later than bare restores."""

import statistics
from contextlib import AsyncExitStack

import anyio

from mcp_sandbox.commands.bench.results import Figure, Findings, Promise, figure
from mcp_sandbox.commands.bench.server import NO_OP, BenchServer, open_server, sandbox_of
from mcp_sandbox.commands.bench.subject import MeasurementFailed, Subject
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.machines.provider import MachineRequest
from mcp_sandbox.views import SandboxView

READY = 4  # machines in the pool that a burst comes upon
BURST = 20
QUEUE_S = 300.0  # the burst is about how long everybody waits, not about who gives up


async def measure(subject: Subject) -> Findings:
    """Single requests, then bursts."""
    no_op, hit = await hits(subject)
    bare, burst, ratio = await bursts(subject)
    created = "create_sandbox on a pool hit over a no-op tool"
    return Findings(
        [no_op, hit, bare, burst],
        [
            Promise(f"{created}, p50", hit.p50 / no_op.p50, 3, "times"),
            Promise(f"{created}, p99", hit.p99 / no_op.p50, 10, "times"),
            Promise(f"the slowest of {BURST} at once over {BURST - READY} bare restores", ratio, 1.5, "times"),
        ],
    )


async def hits(subject: Subject) -> tuple[Figure, Figure]:
    """create_sandbox with a machine ready, and a tool that touches none, on a server that does nothing else."""
    no_op: list[float] = []
    hit: list[float] = []
    async with open_server(subject.settings, {"pool.min": 1, "pool.max": 1}) as server:
        for number in range(subject.plan.pool_hits):
            subject.tell(f"pool hits: {number} of {subject.plan.pool_hits}")
            await server.settled(1)
            await server.call(NO_OP, {})  # the first call after a pause is a slow one, whichever it is
            no_op.append((await server.timed(NO_OP, {}))[0])
            took_ms, created = await server.timed("create_sandbox", {})
            if SandboxView.model_validate(created.structured_content).restore_ms:
                raise MeasurementFailed("A machine was ready in the pool and was not handed out.")
            hit.append(took_ms)
            await server.close(sandbox_of(created))
    return figure("a tool that touches no machine", "ms", no_op), figure("create_sandbox on a pool hit", "ms", hit)


async def bursts(subject: Subject) -> tuple[Figure, Figure, float]:
    """As many restores as the pool cannot save, and bursts of requests, taking turns; also the ratio in the middle."""
    bare: list[float] = []
    burst: list[float] = []
    limits = {"limits.sandboxes": 2 * BURST, "limits.queue_timeout_s": QUEUE_S, "pool.min": READY, "pool.max": READY}
    memory_mb = READY * subject.built.template.machine.memory_mb
    async with open_server(subject.settings, {**limits, "pool.memory_mb": memory_mb}) as server:
        for number in range(subject.plan.bursts + 1):
            subject.tell(f"bursts: {number} of {subject.plan.bursts}")
            await server.settled(READY)
            bare.append(await _restores_at_once(subject, BURST - READY))
            burst.append(await _creates_at_once(server, BURST))
    del bare[0], burst[0]  # these loaded the snapshot's memory
    ratio = statistics.median(late / free for late, free in zip(burst, bare, strict=True))
    return (
        figure(f"{BURST - READY} bare restores", "ms", bare),
        figure(f"the slowest of {BURST} create_sandbox at once, {READY} machines ready", "ms", burst),
        ratio,
    )


async def _restores_at_once(subject: Subject, count: int) -> float:
    """Milliseconds until all of them are there, as many at a time as a server would do."""
    settings = subject.settings
    builds = Builds(subject.driver, subject.builder, settings.catalogue)
    provider = LocalProvider(subject.driver, builds, max_restores=settings.limits.restores, run_dir=settings.run_dir)
    await provider.facts()
    began, missing, all_there = anyio.current_time(), count, anyio.Event()

    async def hold() -> None:
        nonlocal missing
        async with provider.acquire(MachineRequest(subject.built.template.name)):
            missing -= 1
            if missing == 0:
                all_there.set()
            await all_there.wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(hold)
        await all_there.wait()
        took_s = anyio.current_time() - began
    return 1000 * took_s


async def _creates_at_once(server: BenchServer, count: int) -> float:
    """Milliseconds until the last one is served. All are closed afterwards."""
    times: list[float] = []

    async with AsyncExitStack() as stack:

        async def create() -> None:
            took_ms, created = await server.timed("create_sandbox", {})
            times.append(took_ms)
            stack.push_async_callback(server.close, sandbox_of(created))

        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(create)
    return max(times)
