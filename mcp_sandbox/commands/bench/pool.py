"""The pool: the latency of a hit, and a burst of requests compared with bare restores."""

import statistics

import anyio

from mcp_sandbox.commands.bench.results import Figure, Findings, Promise, figure
from mcp_sandbox.commands.bench.server import NO_OP, open_server, pool_of, sandbox_of
from mcp_sandbox.commands.bench.subject import MeasurementFailed, Subject
from mcp_sandbox.machines.builds import Builds
from mcp_sandbox.machines.local import LocalProvider
from mcp_sandbox.machines.provider import MachineRequest
from mcp_sandbox.views import SandboxView

READY = 4  # machines in the pool when a burst begins
BURST = 20
QUEUE_S = 300.0  # long enough that no request of a burst gives up


async def measure(subject: Subject) -> Findings:
    """Measure single requests, then bursts."""
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
    """Time create_sandbox with a machine ready, and a tool that uses none, on an otherwise idle server."""
    no_op: list[float] = []
    hit: list[float] = []
    async with open_server(subject.settings, pool_of(subject, 1)) as server:
        await server.fill_pool(1)
        for number in range(subject.plan.pool_hits):
            subject.progress(f"pool hits: {number} of {subject.plan.pool_hits}")
            await server.wait_idle(1)
            await server.call(NO_OP, {})  # the first call after a pause is slow
            no_op.append((await server.time_call(NO_OP, {}))[0])
            took_ms, created = await server.time_call("create_sandbox", {})
            if SandboxView.model_validate(created.structured_content).restore_ms:
                raise MeasurementFailed("A machine was ready in the pool and was not handed out.")
            hit.append(took_ms)
            await server.close(sandbox_of(created))
    return figure("a tool that uses no machine", "ms", no_op), figure("create_sandbox on a pool hit", "ms", hit)


async def bursts(subject: Subject) -> tuple[Figure, Figure, float]:
    """Alternate between bursts and as many bare restores as a burst needs; also return their median ratio."""
    bare: list[float] = []
    burst: list[float] = []
    limits = {"limits.sandboxes": 2 * BURST, "limits.queue_timeout_s": QUEUE_S}
    async with open_server(subject.settings, {**limits, **pool_of(subject, READY)}) as server:
        await server.fill_pool(READY)
        for number in range(subject.plan.bursts + 1):
            subject.progress(f"bursts: {number} of {subject.plan.bursts}")
            await server.wait_idle(READY)
            bare.append(await _restores_at_once(subject, BURST - READY))
            burst.append(await server.burst(BURST))
    del bare[0], burst[0]  # these loaded the snapshot's memory
    ratio = statistics.median(late / free for late, free in zip(burst, bare, strict=True))
    return (
        figure(f"{BURST - READY} bare restores", "ms", bare),
        figure(f"the slowest of {BURST} create_sandbox at once, {READY} machines ready", "ms", burst),
        ratio,
    )


async def _restores_at_once(subject: Subject, count: int) -> float:
    """Return the milliseconds until all machines are restored, as many at a time as a server restores."""
    settings = subject.settings
    builds = Builds(subject.driver, subject.builder, settings.catalogue)
    provider = LocalProvider(subject.driver, builds, max_restores=settings.limits.restores, run_dir=settings.run_dir)
    await provider.facts()
    began, missing, all_ready = anyio.current_time(), count, anyio.Event()

    async def hold() -> None:
        nonlocal missing
        async with provider.acquire(MachineRequest(subject.built.template.name)):
            missing -= 1
            if missing == 0:
                all_ready.set()
            await all_ready.wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(hold)
        await all_ready.wait()
        took_s = anyio.current_time() - began
    return 1000 * took_s
