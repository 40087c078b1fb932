"""What a sandbox without a network pays for those that have one: nothing."""

from dataclasses import dataclass, field

import anyio
from anyio.abc import ByteStream

from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.subject import MB, Subject, run_code
from mcp_sandbox.machines.local import start
from mcp_sandbox.machines.unique import new_identity
from vmm.types import NetworkMode

NOISE = 1.1  # times: two series of equal machines may differ by this much
RUNS = 10  # in each machine


@dataclass(slots=True)
class Samples:
    """What machines of one mode took."""

    start_ms: list[float] = field(default_factory=list)
    run_ms: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)


async def measure(subject: Subject) -> Findings:
    """Start machines of both modes by turns, so that a busy host slows both, and compare mode none with mode proxy."""
    modes = {mode: Samples() for mode in (NetworkMode.PROXY, NetworkMode.NONE)}
    for number in range(subject.plan.restores + 1):
        subject.progress(f"machines of each mode: {number} of {subject.plan.restores}")
        for mode, samples in modes.items():
            await _one(subject, mode, samples if number else Samples())  # the first one loads the snapshot's memory
    findings = Findings()
    for what, unit in (("start_ms", "ms"), ("run_ms", "ms"), ("memory_mb", "MB")):
        name = {"start_ms": "start of a machine", "run_ms": "run_code", "memory_mb": "memory"}[what]
        proxy, none = (figure(f"{name}, mode {mode}", unit, getattr(samples, what)) for mode, samples in modes.items())
        findings.figures += [none, proxy]
        findings.promises.append(Promise(f"{name}, mode none over proxy, p50", none.p50 / proxy.p50, NOISE, "times"))
    return findings


async def _one(subject: Subject, mode: NetworkMode, samples: Samples) -> None:
    async def refuse(_stream: ByteStream) -> None:
        """Serve no stream."""

    began = anyio.current_time()
    serve = refuse if mode is NetworkMode.PROXY else None
    async with start(subject.driver, subject.built, new_identity(network=mode), mode, serve) as (machine, agent):
        samples.start_ms.append(1000 * (anyio.current_time() - began))
        await run_code(agent)
        for _ in range(RUNS):
            began = anyio.current_time()
            await run_code(agent)
            samples.run_ms.append(1000 * (anyio.current_time() - began))
        samples.memory_mb.append((await machine.usage()).memory_bytes / MB)
