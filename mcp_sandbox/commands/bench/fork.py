"""Forks of a live sandbox with a large DataFrame in memory."""

import anyio

from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.server import BenchServer, open_server
from mcp_sandbox.commands.bench.subject import MeasurementFailed, Subject
from mcp_sandbox.views import ForkedSandboxes

TOOL = "fork_sandbox"
MEGABYTES = 100
LIMIT_MS = 400
FRAME = f"""
import numpy as np, pandas as pd
frame = pd.DataFrame(np.random.default_rng().random(({MEGABYTES} * 125_000 // 10, 10)))
whose = "original"
frame.memory_usage().sum() // 1_000_000
"""


async def measure(subject: Subject) -> Findings:
    """Fork one sandbox several times, one copy at a time, each up to its first result."""
    samples = []
    async with open_server(subject.settings, {"pool.max": 0, "toolsets": ("advanced",)}) as server:
        if TOOL not in {tool.name for tool in (await server.client.list_tools()).tools}:
            return Findings(left_out=[f"fork was not measured: the server has no tool {TOOL}"])
        original = await server.create()
        await server.run(original, FRAME)
        for number in range(subject.plan.forks):
            subject.progress(f"forks: {number} of {subject.plan.forks}")
            samples.append(await _fork(server, original))
    forked = figure(f"fork with a DataFrame of {MEGABYTES} MB to the first result in the copy", "ms", samples)
    return Findings([forked], [Promise("fork to first result in the copy, p50", forked.p50, LIMIT_MS, "ms")])


async def _fork(server: BenchServer, original: str) -> float:
    """Return the milliseconds until a copy has its first result.

    Raises:
        MeasurementFailed: the copy shares state with the original.
    """
    began = anyio.current_time()
    forked = await server.call(TOOL, {"sandbox_id": original, "count": 1})
    [copied] = ForkedSandboxes.model_validate(forked.structured_content).copies
    copy = copied.sandbox_id
    shape = await server.run(copy, "frame.shape")
    took_ms = 1000 * (anyio.current_time() - began)
    await server.run(copy, "whose = 'copy'; frame.iloc[0, 0] = 7")
    seen = await server.run(original, "frame.shape, whose, bool(frame.iloc[0, 0] < 1)")
    if seen != f"({shape}, 'original', True)":
        raise MeasurementFailed(f"A copy of a sandbox is not independent of its original: {seen}")
    await server.close(copy)
    return took_ms
