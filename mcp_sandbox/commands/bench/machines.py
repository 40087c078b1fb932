"""Restored machines compared with cold-started ones: time to the first result, and memory."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise

import anyio
from anyio.abc import TaskStatus

from guest.client import AgentClient
from mcp_sandbox.commands.bench.results import Figure, Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import MB, Subject, run_code
from mcp_sandbox.machines.local import start_machine
from mcp_sandbox.machines.unique import new_identity, open_unique
from templates.snapshot import WARM_TIMEOUT_S
from vmm.types import Accel

BOOTS_AT_ONCE = 2  # of those that are not timed: an emulated boot keeps one core busy
TIMES_FASTER = {"qemu": 100, "gvisor": 5}
DEFAULT_TIMES_FASTER = 5
CLONE_LIMITS = {"qemu": (150, 40), "gvisor": (250, 60)}  # ms to the first result, MB
PHASES = ("its process has started", "its agent has answered and is unique", "it has a result")


async def measure(subject: Subject) -> Findings:
    """Restore half of the machines before the cold starts and half after them, so that a slower host slows both."""
    half = subject.plan.restores // 2
    phases = await restores(subject, half)
    clone_memory = await memory_of_clones(subject)
    cold_start, cold_memory = await cold_boots(subject)
    phases += await restores(subject, subject.plan.restores - half)
    total = figure("restore to first result", "ms", [sum(sample) for sample in phases])
    parts = [
        figure(f"  of that, until {phase}", "ms", [sample[number] for sample in phases])
        for number, phase in enumerate(PHASES)
    ]
    promises = _promises(subject, total, cold_start, clone_memory, cold_memory)
    return Findings([total, *parts, cold_start, clone_memory, cold_memory], promises)


def _promises(
    subject: Subject, restored: Figure, booted: Figure, clone_memory: Figure, cold_memory: Figure
) -> list[Promise]:
    driver = subject.driver.name
    faster = "restore to first result, faster than cold start and warm-up"
    promised = TIMES_FASTER.get(driver, DEFAULT_TIMES_FASTER)
    promises = [Promise(faster, booted.p50 / restored.p50, promised, "times", at_least=True)]
    if driver == "qemu":
        saved = 100 * (1 - clone_memory.p50 / cold_memory.p50)
        promises.append(Promise("memory an idle clone saves against a cold boot", saved, 70, "%", at_least=True))
    if (limits := CLONE_LIMITS.get(driver)) and subject.facts.accel is not Accel.KVM:
        promises.append(Promise("restore to first result, p50", restored.p50, limits[0], "ms"))
        promises.append(Promise("PSS of an idle clone", clone_memory.p50, limits[1], "MB"))
    return promises


async def restores(subject: Subject, count: int) -> list[Sequence[float]]:
    """Restore machines one at a time and return the milliseconds that each phase took, up to the first result."""
    samples = []
    for number in range(count + 1):
        subject.progress(f"restore to first result: {number} of {count}")
        samples.append(await _restore(subject, f"bench-{number}"))
    return samples[1:]  # the first one loads the snapshot's memory


async def _restore(subject: Subject, name: str) -> Sequence[float]:
    identity = new_identity(name)
    times = [anyio.current_time()]
    async with start_machine(subject.driver, subject.built, subject.built.spec(name)) as machine:
        times.append(anyio.current_time())
        async with open_unique(await machine.connect(), identity, subject.driver.capabilities) as agent:
            times.append(anyio.current_time())
            await run_code(agent)
            times.append(anyio.current_time())
    return [1000 * (after - before) for before, after in pairwise(times)]


async def memory_of_clones(subject: Subject) -> Figure:
    """Measure the proportional memory of restored, unused machines that are alive at the same time."""
    count = subject.plan.clones
    subject.progress(f"memory of {count} idle clones")
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(subject.start(f"bench-idle-{number}")) for number in range(count)]
        samples = [(await machine.usage()).memory_bytes / MB for machine, _ in started]
    return figure("PSS of an idle clone", "MB", samples)


async def cold_boots(subject: Subject) -> tuple[Figure, Figure]:
    """Start and warm up machines without a snapshot, and keep them until all have a result.

    Returns the times to the first result and the memory. The first machines start one at a time, and only they are
    timed.
    """
    plan, built = subject.plan, subject.built
    memory: list[float] = []
    ready = 0
    limiter, all_ready = anyio.Semaphore(BOOTS_AT_ONCE), anyio.Event()

    async def boot(number: int, *, task_status: TaskStatus[float] = anyio.TASK_STATUS_IGNORED) -> None:
        nonlocal ready
        async with AsyncExitStack() as stack:
            async with limiter:
                began = anyio.current_time()
                machine = await stack.enter_async_context(subject.driver.launch(built.spec(f"bench-cold-{number}")))
                stream = await machine.connect()
                agent = await stack.enter_async_context(AgentClient.open(stream, timeout_s=WARM_TIMEOUT_S))
                await agent.warm(built.warm_up, timeout_s=WARM_TIMEOUT_S)
                await run_code(agent)
                took_s = anyio.current_time() - began
            ready += 1
            subject.progress(f"cold starts: {ready} of {plan.cold_boots}, the last took {took_s:.0f} s")
            if ready == plan.cold_boots:
                all_ready.set()
            task_status.started(1000 * took_s)
            await all_ready.wait()
            memory.append((await machine.usage()).memory_bytes / MB)

    subject.progress(f"cold starts: 0 of {plan.cold_boots}")
    async with anyio.create_task_group() as tasks:
        times = [await tasks.start(boot, number) for number in range(plan.timed_boots)]
        for number in range(plan.timed_boots, plan.cold_boots):
            tasks.start_soon(boot, number)
    return (
        figure("cold start and warm-up to first result", "ms", times),
        figure("PSS of a machine started cold", "MB", memory),
    )
