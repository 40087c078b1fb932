"""The latency of a short run in a live sandbox: through the agent client alone, and as an MCP tool over stdio."""

import anyio

from mcp_sandbox.commands.bench.results import Figure, Findings, Promise, figure
from mcp_sandbox.commands.bench.server import NO_OP, open_server
from mcp_sandbox.commands.bench.subject import FIRST_CODE, Subject, run_code


async def measure(subject: Subject) -> Findings:
    """Measure both ways."""
    agent = await through_agent(subject)
    no_op, tool = await over_stdio(subject)
    promises = [Promise("run_code in a live sandbox over a no-op tool", tool.p50 - no_op.p50, 10, "ms more")]
    if subject.driver.name == "gvisor":
        promises.append(Promise("a run in a live machine through the agent client, p50", agent.p50, 2, "ms"))
    return Findings([agent, no_op, tool], promises)


async def through_agent(subject: Subject) -> Figure:
    """Time runs in one machine, without a server."""
    samples = []
    async with subject.start("bench-calls") as (_, agent):
        await run_code(agent)
        for number in range(subject.plan.calls):
            subject.progress(f"calls through the agent client: {number} of {subject.plan.calls}")
            began = anyio.current_time()
            await run_code(agent)
            samples.append(1000 * (anyio.current_time() - began))
    return figure("a run in a live machine through the agent client", "ms", samples)


async def over_stdio(subject: Subject) -> tuple[Figure, Figure]:
    """Time MCP tool calls, alternating between one that uses no machine and one that runs code."""
    no_op: list[float] = []
    live: list[float] = []
    async with open_server(subject.settings, {"pool.max": 0}) as server:  # a refill would disturb the calls
        arguments = {"sandbox_id": await server.create(), "code": FIRST_CODE}
        for number in range(subject.plan.calls):
            subject.progress(f"calls over stdio: {number} of {subject.plan.calls}")
            no_op.append((await server.time_call(NO_OP, {}))[0])
            live.append((await server.time_call("run_code", arguments))[0])
    return figure("a tool that uses no machine", "ms", no_op), figure("run_code in a live sandbox", "ms", live)
