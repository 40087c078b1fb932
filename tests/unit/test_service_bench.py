"""What the bench times, and under which conditions: the figures must be like for like."""

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

from guest.client import AgentClient
from mcp_sandbox.commands.bench import compiling, cpu, machines, soak
from mcp_sandbox.commands.bench.command import TOPICS, Topic, chosen, concerned, measured
from mcp_sandbox.commands.bench.results import Findings, Promise, figure
from mcp_sandbox.commands.bench.server import is_settled
from mcp_sandbox.commands.bench.subject import QUICK, Plan, Subject
from mcp_sandbox.errors import SandboxError, StartFailed
from mcp_sandbox.machines.provider import HostFacts
from templates.catalogue import Catalogue
from vmm.driver import DRIVERS
from vmm.types import Accel, Capabilities, Isolation, Usage

if TYPE_CHECKING:
    from mcp_sandbox.app import Host
    from templates.build import BuiltTemplate

FACTS = HostFacts("qemu", Isolation.VM, Accel.TCG)


class BootingHost:
    """Boots machines that do nothing, and knows how many of them boot at once."""

    name = "qemu"
    capabilities = Capabilities(isolation=Isolation.VM, snapshot=True)

    def __init__(self) -> None:
        self.driver = self
        self.booting: set[str] = set()
        self.company: dict[str, int] = {}
        self.alive = self.most_alive = 0

    @asynccontextmanager
    async def launch(self, name: str) -> AsyncIterator[SimpleNamespace]:
        self.booting.add(name)
        self.alive += 1
        self.most_alive = max(self.alive, self.most_alive)
        for other in self.booting:
            self.company[other] = max(self.company.get(other, 0), len(self.booting))

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
    built = SimpleNamespace(spec=lambda name: name, warm_up=None)
    return Subject(cast("Host", host), FACTS, cast("BuiltTemplate", built), plan, lambda _: None)


async def test_a_cold_boot_that_is_timed_has_the_host_to_itself(monkeypatch: pytest.MonkeyPatch):
    async def first_run(_agent: object) -> None: ...

    host = BootingHost()
    monkeypatch.setattr(AgentClient, "open", host.open)
    monkeypatch.setattr(machines, "run_code", first_run)
    with anyio.fail_after(5):
        time, memory = await machines.cold_boots(subject_of(host, replace(QUICK, cold_boots=6, timed_boots=2)))
    assert (time.samples, memory.samples, host.most_alive) == (2, 6, 6)
    assert [host.company[f"bench-cold-{number}"] for number in range(2)] == [1, 1]
    assert max(host.company.values()) == 2
    assert "warm-up" in time.name


def test_a_figure_has_its_middle_and_its_upper_end():
    found = figure("calls", "ms", [float(number) for number in range(100, 0, -1)])
    assert (found.samples, found.p50, found.p95, found.p99) == (100, 50.5, 95.0, 99.0)
    assert figure("calls", "ms", [3.0]).p99 == 3.0


def test_a_promise_is_kept_on_its_limit_and_on_its_own_side_of_it():
    assert [Promise("slow", value, 2, "ms").kept for value in (1.9, 2, 2.1)] == [True, True, False]
    assert [Promise("fast", value, 2, "times", at_least=True).kept for value in (1.9, 2, 2.1)] == [False, True, True]


def test_all_is_measured_but_what_takes_very_long():
    assert "soak" not in chosen((), soaked=False)
    assert list(chosen((), soaked=True)) == list(TOPICS)
    assert list(chosen(("pool", "cpu"), soaked=False)) == ["cpu", "pool"]
    with pytest.raises(SandboxError, match="no benchmark 'speed'; choose among: restore"):
        chosen(("speed",), soaked=False)


def everyone(_can: Capabilities) -> bool:
    return True


def nobody(_can: Capabilities) -> bool:
    return False


async def test_a_topic_that_fails_costs_nothing_but_itself():
    async def fail(_subject: Subject) -> Findings:
        raise ExceptionGroup("from a task group", [StartFailed("no machine came")])

    async def find(_subject: Subject) -> Findings:
        return Findings(promises=[Promise("fast", 1, 2, "ms")])

    subject = subject_of(BootingHost(), QUICK)
    topics = {"a": Topic(fail, everyone), "b": Topic(find, everyone), "c": Topic(fail, nobody)}
    part = await measured(subject, topics)
    assert [promise.text for promise in part.findings.promises] == ["fast"]
    assert part.findings.left_out == [
        "a could not be measured: The sandbox could not be started: no machine came.",
        "c does not concern it",
    ]


async def test_a_mistake_of_ours_is_not_taken_for_a_finding():
    async def fail(_subject: Subject) -> Findings:
        raise KeyError("sandboxes")

    with pytest.raises(KeyError):
        await measured(subject_of(BootingHost(), QUICK), {"a": Topic(fail, everyone)})


def test_every_driver_that_can_be_chosen_is_measured():
    assert concerned(TOPICS) == list(DRIVERS)


def test_the_code_that_is_timed_runs_the_same_way_natively():
    done = subprocess.run([sys.executable, "-c", cpu.WORK + cpu.ANSWER], input=b"\n\n", capture_output=True, check=True)
    assert [float(line) > 0 for line in done.stdout.split()] == [True, True]


def test_what_compiles_natively_compiles_and_runs_each_order_anew(tmp_path: Path):
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


def test_compiling_is_judged_by_the_ratios_of_neighbours():
    cpp, go = compiling.LANGUAGES
    found = compiling._findings(cpp, [1.0, 2.0, 3.0], [1.0, 4.0, 3.3], [4.0, 8.0, 9.9])
    assert [(round(promise.value, 6), promise.kept) for promise in found.promises] == [(1.1, True), (3.0, True)]
    assert [promise.kept for promise in compiling._findings(go, [1.0], [2.5], []).promises] == [False]


@pytest.mark.parametrize("language", compiling.LANGUAGES, ids=lambda language: language.template)
def test_what_is_compiled_is_of_a_template_there_is(language: compiling.Language):
    assert language.source == f"main.{Catalogue().load(language.template).language}"


@pytest.mark.parametrize(
    ("ready", "machines", "settled"),
    [
        (1, {"starting": 0, "running": 1, "ending": 0}, True),
        (1, {"starting": 1, "running": 1, "ending": 0}, False),
        (1, {"starting": 0, "running": 1, "ending": 1}, False),
        (1, {"starting": 0, "running": 2, "ending": 0}, False),  # somebody has one
        (0, {"starting": 0, "running": 1, "ending": 0}, False),  # it is somebody's
    ],
)
def test_a_server_has_settled_when_only_its_pool_is_left(ready: int, machines: dict[str, int], settled: bool):
    assert is_settled({"pools": [{"ready": ready}], "machines": machines}, 1) is settled


def test_a_soak_forgives_nothing_but_a_little_memory():
    before = soak.Holdings(processes=4, threads=3, descriptors=20, control_groups=4, files=9, server_kb=100_000)
    assert all(promise.kept for promise in soak.growth(before, replace(before, server_kb=104_900), 50))
    assert all(promise.kept for promise in soak.growth(before, replace(before, descriptors=19), 50))
    for field in dataclasses.fields(before):
        more = replace(before, **{field.name: int(1.06 * getattr(before, field.name)) + 1})
        missed = [promise.text for promise in soak.growth(before, more, 50) if not promise.kept]
        assert len(missed) == 1
        assert field.name.replace("_", " ") in missed[0]
