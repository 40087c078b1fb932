"""How much one sandbox can slow down another, and the server: many busy processes in one, short runs in the other."""

import anyio

from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.server import NO_OP, BenchServer, open_server
from mcp_sandbox.commands.bench.subject import FIRST_CODE, Subject

BUSY_PROCESSES = 60
# It ends by itself, in case nothing stops it. Each process is small: what counts is that all of them want a CPU.
BUSY = f"for i in $(seq {BUSY_PROCESSES}); do timeout 300 sh -c 'while :; do :; done' & done; wait"
LEFT_RUNNING = f"for i in $(seq {BUSY_PROCESSES}); do timeout 300 sh -c 'while :; do :; done' >/dev/null 2>&1 & done"
SETTLE_S = 3.0  # until all processes have started; the bandwidth limits act within milliseconds
PAUSE_S = 0.02  # between two calls: a caller thinks


async def measure(subject: Subject) -> Findings:
    """Compare calls beside an idle sandbox, a busy one, and one that no call uses while its processes are busy."""
    async with open_server(subject.settings, {"pool.max": 0}) as server:
        neighbour, hostile = await server.create(), await server.create()
        await _sample(subject, server, neighbour, "warming up")
        alone = await _sample(subject, server, neighbour, "alone")
        await server.call("run_command", {"sandbox_id": hostile, "command": BUSY, "background": True})
        await anyio.sleep(SETTLE_S)
        beside = await _sample(subject, server, neighbour, "beside a busy sandbox")
        await server.close(hostile)
        left = await server.create()
        await server.call("run_command", {"sandbox_id": left, "command": LEFT_RUNNING, "keep_processes": True})
        await anyio.sleep(SETTLE_S)
        behind = await _sample(subject, server, neighbour, "beside processes that were left running")
    found = {"alone": alone, "beside a busy sandbox": beside, "beside processes that were left running": behind}
    runs = [figure(f"run_code {where}", "ms", run_ms) for where, (run_ms, _) in found.items()]
    calls = [figure(f"a tool without a machine {where}", "ms", call_ms) for where, (_, call_ms) in found.items()]
    return Findings(
        [*runs, *calls],
        [
            Promise("run_code beside a busy sandbox over alone, p95", runs[1].p95 / runs[0].p95, 3, "times"),
            Promise("the server beside a busy sandbox over alone, p95", calls[1].p95 / calls[0].p95, 3, "times"),
            Promise("run_code beside processes left running over alone, p95", runs[2].p95 / runs[0].p95, 3, "times"),
        ],
    )


async def _sample(subject: Subject, server: BenchServer, sandbox: str, where: str) -> tuple[list[float], list[float]]:
    """Return how long runs took, and calls that use no machine, in milliseconds."""
    runs: list[float] = []
    calls: list[float] = []
    for number in range(subject.plan.calls):
        subject.progress(f"{where}: {number} of {subject.plan.calls}")
        runs.append((await server.time_call("run_code", {"sandbox_id": sandbox, "code": FIRST_CODE}))[0])
        calls.append((await server.time_call(NO_OP, {}))[0])
        await anyio.sleep(PAUSE_S)
    return runs, calls
