"""`mcp-sandbox bench`: what it measures, under which conditions, and what it prints."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
import typer.main

from guest.client import AgentClient
from mcp_sandbox.cli import app
from mcp_sandbox.commands.bench import compiling, cpu, machines, soak
from mcp_sandbox.commands.bench.command import TOPICS, Topic, choose_topics, drivers_for, measure_driver
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.server import is_idle, pool_of
from mcp_sandbox.commands.bench.subject import QUICK, Plan, Subject
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxError, StartFailed
from mcp_sandbox.machines.pool import pool_limits
from mcp_sandbox.machines.pool_plan import Demand, ReadyMachine, TemplateState, make_plan
from mcp_sandbox.machines.pool_plan import Plan as PoolPlan
from mcp_sandbox.machines.provider import HostFacts
from templates.catalogue import Catalogue
from vmm.driver import DRIVERS
from vmm.types import Accel, Capabilities, Isolation, Usage

if TYPE_CHECKING:
    from mcp_sandbox.app import Host
    from templates.build import BuiltTemplate

FACTS = HostFacts("qemu", Isolation.VM, Accel.TCG)


class BootingHost:
    """Boots machines that do nothing, and counts how many of them boot at the same time."""

    name = "qemu"
    capabilities = Capabilities(isolation=Isolation.VM, snapshot=True)

    def __init__(self) -> None:
        self.driver = self
        self.booting: set[str] = set()
        self.at_once: dict[str, int] = {}
        self.alive = self.most_alive = 0

    @asynccontextmanager
    async def launch(self, name: str) -> AsyncIterator[SimpleNamespace]:
        self.booting.add(name)
        self.alive += 1
        self.most_alive = max(self.alive, self.most_alive)
        for other in self.booting:
            self.at_once[other] = max(self.at_once.get(other, 0), len(self.booting))

        async def connect() -> str:
            return name

        async def usage() -> Usage:
            return Usage(10**6, 0, 0.0)

        try:
            yield SimpleNamespace(connect=connect, usage=usage)
        finally:
            self.alive -= 1

    @asynccontextmanager
    async def open(self, name: str, **_: Any) -> AsyncIterator[SimpleNamespace]:
        async def warm(*_: object, **__: object) -> None:
            await anyio.wait_all_tasks_blocked()
            self.booting.discard(name)

        yield SimpleNamespace(warm=warm)


def subject_of(host: BootingHost, plan: Plan) -> Subject:
    template = SimpleNamespace(name="a", machine=SimpleNamespace(host_mb=512))
    built = SimpleNamespace(spec=lambda name: name, warm_up=None, template=template)
    return Subject(cast("Host", host), FACTS, cast("BuiltTemplate", built), plan, lambda _: None)


async def test_a_timed_cold_start_has_the_host_to_itself(monkeypatch: pytest.MonkeyPatch):
    async def first_run(_agent: object) -> None: ...

    host = BootingHost()
    monkeypatch.setattr(AgentClient, "open", host.open)
    monkeypatch.setattr(machines, "run_code", first_run)
    with anyio.fail_after(5):
        time, memory = await machines.cold_boots(subject_of(host, replace(QUICK, cold_boots=6, timed_boots=2)))
    assert (time.samples, memory.samples, host.most_alive) == (2, 6, 6)
    assert [host.at_once[f"bench-cold-{number}"] for number in range(2)] == [1, 1]
    assert max(host.at_once.values()) == 2
    assert "warm-up" in time.name


def test_the_help_names_every_topic():
    """It is written out, because the command line does not import the benchmarks."""
    bench = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    [names] = [parameter for parameter in bench.params if parameter.name == "names"]
    assert names.help == f"Topics: {', '.join(TOPICS)}. Default: all but soak."


def test_a_figure_has_a_median_and_upper_percentiles():
    found = figure("calls", "ms", [float(number) for number in range(100, 0, -1)])
    assert (found.samples, found.p50, found.p95, found.p99) == (100, 50.5, 95.0, 99.0)
    assert figure("calls", "ms", [3.0]).p99 == 3.0


def test_a_promise_is_kept_at_its_limit_and_on_the_right_side_of_it():
    assert [Promise("slow", value, 2, "ms").kept for value in (1.9, 2, 2.1)] == [True, True, False]
    assert [Promise("fast", value, 2, "times", at_least=True).kept for value in (1.9, 2, 2.1)] == [False, True, True]


def test_without_names_every_topic_but_the_soak_is_measured():
    assert "soak" not in choose_topics((), with_soak=False)
    assert list(choose_topics((), with_soak=True)) == list(TOPICS)
    assert list(choose_topics(("pool", "cpu"), with_soak=False)) == ["cpu", "pool"]
    with pytest.raises(SandboxError, match="no benchmark 'speed'; choose among: restore"):
        choose_topics(("speed",), with_soak=False)


def every_driver(_can: Capabilities) -> bool:
    return True


def no_driver(_can: Capabilities) -> bool:
    return False


async def test_a_failed_topic_does_not_end_the_others_and_each_prints_a_line(capsys: pytest.CaptureFixture[str]):
    async def fail(_subject: Subject) -> Findings:
        raise ExceptionGroup("from a task group", [StartFailed("no machine came")])

    async def find(_subject: Subject) -> Findings:
        printed.append(capsys.readouterr().err)  # without a terminal, lines must not wait for the last topic
        return Findings(promises=[Promise("fast", 1, 2, "ms"), Promise("small", 3, 2, "MB")])

    printed: list[str] = []
    subject = subject_of(BootingHost(), QUICK)
    topics = {"a": Topic(fail, every_driver), "b": Topic(find, every_driver), "c": Topic(fail, no_driver)}
    part = await measure_driver(subject, topics)
    assert [promise.text for promise in part.findings.promises] == ["fast", "small"]
    assert part.findings.left_out == [
        "a could not be measured: The sandbox could not be started: no machine came.",
        "c does not apply to this driver",
    ]
    assert printed == ["qemu: a could not be measured: The sandbox could not be started: no machine came.\n"]
    assert capsys.readouterr().err.splitlines() == [
        "qemu: b measured in 0 s, 1 of 2 promises kept",
        "qemu: c does not apply to this driver",
    ]


async def test_a_bug_is_not_reported_as_a_finding():
    async def fail(_subject: Subject) -> Findings:
        raise KeyError("sandboxes")

    with pytest.raises(KeyError):
        await measure_driver(subject_of(BootingHost(), QUICK), {"a": Topic(fail, every_driver)})


def test_every_driver_is_measured():
    assert drivers_for(TOPICS) == list(DRIVERS)


def test_the_timed_code_runs_natively():
    done = subprocess.run([sys.executable, "-c", cpu.WORK + cpu.ANSWER], input=b"\n\n", capture_output=True, check=True)
    assert [float(line) > 0 for line in done.stdout.split()] == [True, True]


def test_the_native_worker_compiles_and_runs_every_program_it_reads(tmp_path: Path):
    order = {
        "source": "main.sh",
        "code": "#!/bin/sh\necho once >>ran\n",
        "command": ["install", "main.sh", "program"],
        "env": {},
    }
    lines = (json.dumps(order) + "\n").encode()
    done = subprocess.run(
        [sys.executable, "-c", compiling.WORKER, str(tmp_path)], input=2 * lines, capture_output=True, check=True
    )
    assert [float(line) > 0 for line in done.stdout.split()] == [True, True]
    assert (tmp_path / "ran").read_text() == "once\nonce\n"


def test_compiling_is_judged_by_the_ratio_of_each_round():
    cpp, go = compiling.LANGUAGES
    found = compiling._findings(cpp, [1.0, 2.0, 3.0], [1.0, 4.0, 3.3], [4.0, 8.0, 9.9])
    assert [(round(promise.value, 6), promise.kept) for promise in found.promises] == [(1.1, True), (3.0, True)]
    assert [promise.kept for promise in compiling._findings(go, [1.0], [2.5], []).promises] == [False]


@pytest.mark.parametrize("language", compiling.LANGUAGES, ids=lambda language: language.template)
def test_every_compiled_program_has_a_built_in_template(language: compiling.Language):
    assert language.source == f"main.{Catalogue().load(language.template).language}"


@pytest.mark.parametrize(
    ("ready", "machines", "idle"),
    [
        (1, {"starting": 0, "running": 1, "ending": 0}, True),
        (1, {"starting": 1, "running": 1, "ending": 0}, False),
        (1, {"starting": 0, "running": 1, "ending": 1}, False),
        (1, {"starting": 0, "running": 2, "ending": 0}, False),  # a sandbox has one
        (0, {"starting": 0, "running": 1, "ending": 0}, False),  # it is in use
    ],
)
def test_a_server_is_idle_when_all_its_machines_are_in_the_pool(ready: int, machines: dict[str, int], idle: bool):
    pools = [{"template": "a", "ready": ready}, {"template": "b", "ready": 0}]
    assert is_idle({"pools": pools, "machines": machines}, 1) is idle


@pytest.mark.parametrize("ready", [1, 4])
def test_the_pool_under_test_keeps_only_machines_of_the_template_under_test(ready: int):
    settings = Settings().changed(pool_of(subject_of(BootingHost(), QUICK), ready))
    limits = pool_limits(settings.pool, max_restores=settings.limits.restores)
    unused = [TemplateState(name, 512) for name in ("a", "b", "c")]
    assert make_plan(unused, limits, 0.0) == PoolPlan()
    demand = Demand()
    for _ in range(ready):
        demand = demand.after_request(0.0, limits.max_ready)
    requested = replace(unused[0], demand=demand)
    assert set(make_plan([requested, *unused[1:]], limits, 0.0).start) == {"a"}
    kept = replace(requested, ready=tuple(ReadyMachine(number, 0.0) for number in range(ready)))
    plan = make_plan([kept, *unused[1:]], limits, limits.max_age_s / 2)
    assert (plan.start, plan.stop) == ((), ())


def test_a_soak_tolerates_no_growth_but_a_little_memory():
    before = soak.Resources(processes=4, threads=3, descriptors=20, cgroups=4, files=9, server_kb=100_000)
    assert all(promise.kept for promise in soak.growth(before, replace(before, server_kb=104_900), 50))
    assert all(promise.kept for promise in soak.growth(before, replace(before, descriptors=19), 50))
    for field in dataclasses.fields(before):
        more = replace(before, **{field.name: int(1.06 * getattr(before, field.name)) + 1})
        missed = [promise.text for promise in soak.growth(before, more, 50) if not promise.kept]
        assert len(missed) == 1
        assert field.name.replace("_", " ") in missed[0]
