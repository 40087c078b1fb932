"""`mcp-sandbox bench`: the numbers we promise, measured on this host, as ratios within one run."""

import json
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field

import anyio
from anyio.abc import TaskStatus
from rich.console import Console
from rich.table import Table

from guest.client import AgentClient
from guest.client.messages import Finished, RunCode
from mcp_sandbox.app import Host, open_host
from mcp_sandbox.commands.common import SERVER, environment, guarded
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxError, TemplateNotBuilt
from mcp_sandbox.lifetime import run_command
from mcp_sandbox.local import LocalProvider
from templates.build import BuiltTemplate
from templates.model import load_template

MB = 1_000_000
FIRST_CODE = "1+1"
WARM_TIMEOUT_S = 600.0  # a cold machine under emulation imports pandas for half a minute
BOOTS_AT_ONCE = 2  # of those that are not timed: an emulated machine that boots keeps one core busy

err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    restores: int
    clones: int
    cold_boots: int
    timed_boots: int  # the first of them: one at a time, as restores are
    calls: int


FULL = Plan(restores=30, clones=10, cold_boots=10, timed_boots=3, calls=200)
QUICK = Plan(restores=10, clones=10, cold_boots=1, timed_boots=1, calls=50)


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing measured."""

    name: str
    unit: str
    samples: int
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Promise:
    """One number we stand for, and what came out here. Only ratios and differences hold on other hosts."""

    text: str
    value: float
    limit: float
    at_least: bool
    kept: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", self.value >= self.limit if self.at_least else self.value <= self.limit)


@dataclass(frozen=True, slots=True)
class Report:
    """What `bench --json` prints."""

    driver: str
    accel: str
    template: str
    plan: Plan
    figures: list[Figure]
    promises: list[Promise]


def main(settings: Settings, *, quick: bool, as_json: bool) -> int:
    """Measure, print, and say with the exit status whether every promise was kept."""
    plan = QUICK if quick else FULL

    async def measure() -> int:
        async with open_host(settings) as host:
            return await _bench(host, plan, as_json=as_json)

    return guarded(lambda: run_command(measure))


async def _bench(host: Host, plan: Plan, *, as_json: bool) -> int:
    try:
        template = load_template(host.settings.template)
        built = await host.builder.find(template, host.driver)
        if built is None:
            raise TemplateNotBuilt(template.name)
        provider = LocalProvider(host.driver, host.builder, max_restores=1, run_dir=host.settings.run_dir)
        facts = await provider.facts()
        with err.status("starting") as status:
            tell: Callable[[str], None] = status.update
            first_result = await _restores(provider, template.name, plan, tell)
            clone_memory = await _clone_memory(provider, template.name, plan, tell)
            cold_start, cold_memory = await _cold_boots(host, built, plan, tell)
            no_op, live_call = await _calls(host.settings, plan, tell)
    finally:
        with anyio.CancelScope(shield=True):
            await host.driver.aclose()
    figures = [first_result, cold_start, clone_memory, cold_memory, no_op, live_call]
    report = Report(
        facts.driver, str(facts.accel), template.name, plan, figures, _promises(facts.driver, str(facts.accel), figures)
    )
    _print(report, as_json=as_json)
    return 0 if all(promise.kept for promise in report.promises) else 1


def _promises(driver: str, accel: str, figures: list[Figure]) -> list[Promise]:
    first_result, cold_start, clone_memory, cold_memory, no_op, live_call = figures
    promises = [
        Promise(
            "restore is this many times faster than a cold boot and warm-up",
            cold_start.p50 / first_result.p50,
            100,
            True,
        ),
        Promise("memory an idle clone saves against a cold boot, %", _saved(clone_memory, cold_memory), 70, True),
        Promise(
            "run_code in a live sandbox takes this much more than a no-op tool, ms",
            live_call.p50 - no_op.p50,
            10,
            False,
        ),
    ]
    if (driver, accel) == ("qemu", "tcg"):
        promises += [
            Promise("restore to first result p50, ms", first_result.p50, 150, False),
            Promise("PSS of an idle clone, MB", clone_memory.p50, 40, False),
        ]
    return promises


def _saved(less: Figure, more: Figure) -> float:
    return 100 * (1 - less.p50 / more.p50)


def figure(name: str, unit: str, samples: list[float]) -> Figure:
    """Median and 95th percentile of what was measured."""
    ordered = sorted(samples)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return Figure(name, unit, len(ordered), statistics.median(ordered), p95)


async def _first_run(agent: AgentClient) -> None:
    async with agent.run(RunCode(code=FIRST_CODE)) as run:
        async for event in run:
            if isinstance(event, Finished) and event.status != "ok":
                raise SandboxError(f"The first run ended with {event.status}.")


async def _restores(provider: LocalProvider, template: str, plan: Plan, tell: Callable[[str], None]) -> Figure:
    """From asking for a machine to the result of its first run; one at a time, nothing kept ready."""
    samples = []
    for number in range(plan.restores + 1):
        tell(f"restore to first result: {number} of {plan.restores}")
        began = anyio.current_time()
        async with provider.acquire(template) as lease:
            await _first_run(lease.agent)
            samples.append((anyio.current_time() - began) * 1000)
    return figure("restore to first result", "ms", samples[1:])  # the first one loads the snapshot's memory


async def _clone_memory(provider: LocalProvider, template: str, plan: Plan, tell: Callable[[str], None]) -> Figure:
    """Proportional memory of idle machines, all alive at once: restored, made unique, never used."""
    tell(f"memory of {plan.clones} idle clones")
    async with AsyncExitStack() as stack:
        leases = [await stack.enter_async_context(provider.acquire(template)) for _ in range(plan.clones)]
        samples = [(await lease.machine.usage()).memory_bytes / MB for lease in leases]
    return figure("PSS of an idle clone", "MB", samples)


async def _cold_boots(
    host: Host, built: BuiltTemplate, plan: Plan, tell: Callable[[str], None]
) -> tuple[Figure, Figure]:
    """The same machines booted from nothing, warmed up as before a snapshot, kept until all have their first result."""
    memory: list[float] = []
    ready = 0
    limiter, all_there = anyio.Semaphore(BOOTS_AT_ONCE), anyio.Event()

    async def boot(number: int, *, task_status: TaskStatus[float] = anyio.TASK_STATUS_IGNORED) -> None:
        nonlocal ready
        async with AsyncExitStack() as stack:
            async with limiter:
                began = anyio.current_time()
                machine = await stack.enter_async_context(host.driver.launch(built.spec(f"bench-cold-{number}")))
                stream = await machine.connect()
                agent = await stack.enter_async_context(AgentClient.open(stream, timeout_s=WARM_TIMEOUT_S))
                await agent.warm(built.template.warmup.code, timeout_s=WARM_TIMEOUT_S)
                await _first_run(agent)
                took_s = anyio.current_time() - began
            ready += 1
            tell(f"cold boots: {ready} of {plan.cold_boots}, the last took {took_s:.0f} s")
            if ready == plan.cold_boots:
                all_there.set()
            task_status.started(1000 * took_s)
            await all_there.wait()
            memory.append((await machine.usage()).memory_bytes / MB)

    tell(f"cold boots: 0 of {plan.cold_boots}")
    async with anyio.create_task_group() as tasks:
        times = [await tasks.start(boot, number) for number in range(plan.timed_boots)]
        for number in range(plan.timed_boots, plan.cold_boots):
            tasks.start_soon(boot, number)
    return (
        figure("cold boot and warm-up to first result", "ms", times),
        figure("PSS of a cold-booted machine", "MB", memory),
    )


async def _calls(settings: Settings, plan: Plan, tell: Callable[[str], None]) -> tuple[Figure, Figure]:
    """Tool calls through MCP over stdio, one that touches no machine and one that runs code, taking turns."""
    from mcp import Client, StdioServerParameters
    from mcp.types import TextContent

    server = StdioServerParameters(command=sys.executable, args=list(SERVER), env=environment(settings))
    no_op: list[float] = []
    live: list[float] = []
    async with Client(server) as client:
        created = await client.call_tool("create_sandbox", {})
        if created.is_error or created.structured_content is None:
            problem = " ".join(block.text for block in created.content if isinstance(block, TextContent))
            raise SandboxError(f"create_sandbox failed: {problem}")
        box = created.structured_content["sandbox_id"]
        for number in range(plan.calls):
            tell(f"calls over stdio: {number} of {plan.calls}")
            began = anyio.current_time()
            await client.call_tool("list_sandboxes", {})
            between = anyio.current_time()
            await client.call_tool("run_code", {"sandbox_id": box, "code": FIRST_CODE})
            no_op.append((between - began) * 1000)
            live.append((anyio.current_time() - between) * 1000)
    return figure("a tool that touches no machine", "ms", no_op), figure("run_code in a live sandbox", "ms", live)


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
        return
    console = Console(highlight=False)
    measured = Table(
        "measured", "samples", "p50", "p95", title=f"{report.template} on {report.driver} ({report.accel})"
    )
    for entry in report.figures:
        measured.add_row(entry.name, str(entry.samples), *(f"{v:,.1f} {entry.unit}" for v in (entry.p50, entry.p95)))
    console.print(measured)
    promised = Table("promise", "wanted", "here", "")
    for promise in report.promises:
        wanted = f"{'≥' if promise.at_least else '≤'} {promise.limit:g}"
        promised.add_row(
            promise.text, wanted, f"{promise.value:,.1f}", "[green]kept[/]" if promise.kept else "[red]missed[/]"
        )
    console.print(promised)
