"""Short shell commands and a small figure in a live sandbox, as MCP tools over stdio."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from mcp_sandbox.commands.bench.results import Figure, Findings, Promise, figure
from mcp_sandbox.commands.bench.server import BenchServer, open_server
from mcp_sandbox.commands.bench.subject import MeasurementFailed, Subject
from mcp_sandbox.commands.common import run_of

PAUSE_S = 0.3  # between two calls: a model thinks longer, and the next command's shell is started meanwhile
CALLS = 10  # one in so many calls of the plan is enough: a pause follows each
FIGURE = "import matplotlib.pyplot as plt; plt.plot([1, 2, 3]); plt.show()"  # `first` compares it with native


@dataclass(frozen=True, slots=True)
class Case:
    """A tool call, and how long it may take in gVisor."""

    title: str
    tool: str
    arguments: Mapping[str, Any]
    limit_ms: float | None = None


CASES = (
    Case("list_files", "list_files", {}),  # for scale: it starts no process
    Case("run_command true", "run_command", {"command": "true"}, 15),
    Case("run_command ls -la", "run_command", {"command": "ls -la"}, 40),
    Case("run_command python3 -c pass", "run_command", {"command": "python3 -c pass"}, 80),
    Case("run_code of a small figure", "run_code", {"code": FIGURE}),
)


async def measure(subject: Subject) -> Findings:
    """Time each call after a pause, and commands also one right after the other."""
    findings = Findings()
    async with open_server(subject.settings, {"pool.max": 0}) as server:  # a refill would disturb the calls
        sandbox = await server.create()
        for case in CASES:
            paused = await _time(subject, server, sandbox, case, PAUSE_S)
            findings.figures.append(paused)
            if case.limit_ms is not None and subject.driver.name == "gvisor":
                findings.promises.append(Promise(f"{case.title}, p50", paused.p50, case.limit_ms, "ms"))
        findings.figures.append(await _time(subject, server, sandbox, CASES[1], 0))
    return findings


async def _time(subject: Subject, server: BenchServer, sandbox: str, case: Case, pause_s: float) -> Figure:
    samples = []
    count = max(CALLS, subject.plan.calls // CALLS)
    title = case.title if pause_s else f"{case.title}, one right after the other"
    for number in range(count + 1):
        subject.progress(f"{title}: {number} of {count}")
        took_ms, result = await server.time_call(case.tool, {"sandbox_id": sandbox, **case.arguments})
        if case.tool != "list_files" and (view := run_of(result)).status != "ok":
            raise MeasurementFailed(f"{case.title} ended with {view.status}.")
        samples.append(took_ms)
        await anyio.sleep(pause_s)
    return figure(title, "ms", samples[1:])  # the first one touches memory for the first time
