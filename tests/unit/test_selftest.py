"""`mcp-sandbox selftest`: verdicts, reports and exit codes, with cases and sandboxes that exist only in memory."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from typer.testing import CliRunner, Result

from guest.client.messages import Output
from mcp_sandbox.cli import app
from mcp_sandbox.commands.selftest import basics, bombs, cases, command, inside, trespasses
from mcp_sandbox.commands.selftest.cases import BASICS, SECURITY, Case
from mcp_sandbox.commands.selftest.inside import privileges
from mcp_sandbox.commands.selftest.inside.attempts import Attempts
from mcp_sandbox.commands.selftest.results import MAX_DETAIL_CHARS, Outcome, Verdict, broken, held, not_applicable
from mcp_sandbox.commands.selftest.subject import OWNER, Subject
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import StartFailed
from mcp_sandbox.sandboxes.service import SandboxService
from tests.unit.fakes import FACTS, FakeProvider, finished
from vmm.process_table import ProcessId
from vmm.types import Capabilities, Isolation

VM = Capabilities(isolation=Isolation.VM, snapshot=True)
WEAK = Capabilities(isolation=Isolation.NAMESPACE, snapshot=False)
GETPID, READ = 39, 0


def case(check: Callable[[Subject], Awaitable[Outcome]], name: str = "a promise holds") -> Case:
    return Case("topic", name, check, "Do something.")


async def finds(outcome: Outcome) -> Outcome:
    return outcome


async def cannot_start(_: Subject) -> Outcome:
    raise StartFailed("created", "no memory")


HOLDS = case(lambda _: finds(held("tried 3 ways")), "it holds")
BREAKS = case(lambda _: finds(broken("possible: [red]mount[/]")), "it breaks")
SKIPPED = case(lambda _: finds(not_applicable("no such thing")), "it is skipped")
FAILS = case(cannot_start, "it fails")


@asynccontextmanager
async def fake_subject(provider: FakeProvider | None = None) -> AsyncIterator[Subject]:
    """Sandboxes that answer when they are asked whether they go on, and print `ran` otherwise."""
    provider = provider or FakeProvider()
    provider.plans["echo goes on"] = [Output("stdout", "goes on\n"), finished()]
    async with SandboxService(provider, Settings()) as service:
        yield Subject(service, VM, "secret")


async def verdict_on(printed: str) -> Outcome:
    """Return the verdict on an attack that prints this."""
    provider = FakeProvider()
    async with fake_subject(provider) as subject:
        assert (await subject.attack(privileges.become_root)).verdict is Verdict.FAILED  # it printed `ran`
        sent = provider.agent.requests[-1].code
        provider.agent.plans[sent] = [Output("stdout", printed), finished()]
        return await subject.attack(privileges.become_root)


@pytest.fixture
def fake_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a driver, without its machines."""

    @asynccontextmanager
    async def open_host(_settings: Settings) -> AsyncIterator[object]:
        yield SimpleNamespace(facts=FACTS, choice=SimpleNamespace(verdict=None))

    monkeypatch.setattr(command, "open_host", open_host)
    monkeypatch.setattr(command, "open_subject", lambda _host: fake_subject())
    monkeypatch.setattr(command, "tree_of", lambda _pid: (ProcessId(1, 1), ProcessId(2, 1)))
    monkeypatch.setattr(command, "is_alive", lambda _process: False)


def selftest(monkeypatch: pytest.MonkeyPatch, *given: Case, arguments: tuple[str, ...] = ()) -> Result:
    monkeypatch.setattr(command, "SECURITY", given)
    return CliRunner().invoke(app, ["selftest", "--security", *arguments], env={"COLUMNS": "200"})


@pytest.mark.usefixtures("fake_host")
def test_the_exit_code_is_0_if_everything_holds_or_does_not_apply(monkeypatch: pytest.MonkeyPatch):
    result = selftest(monkeypatch, HOLDS, SKIPPED)
    assert result.exit_code == 0, result.output
    assert "3 cases, nothing broken" in result.stdout
    assert "held: it holds" in result.stderr  # progress, where no terminal shows it


@pytest.mark.usefixtures("fake_host")
@pytest.mark.parametrize("bad", [BREAKS, FAILS], ids=["broken", "failed"])
def test_the_exit_code_is_1_if_a_case_is_broken_or_could_not_be_tried(monkeypatch: pytest.MonkeyPatch, bad: Case):
    result = selftest(monkeypatch, HOLDS, bad)
    assert result.exit_code == 1
    assert f"{bad.name}: Do something." in result.stdout
    assert "nothing broken" not in result.stdout


@pytest.mark.usefixtures("fake_host")
def test_a_part_of_the_cases_can_be_chosen_by_topic_or_name(monkeypatch: pytest.MonkeyPatch):
    result = selftest(monkeypatch, HOLDS, BREAKS, arguments=("--only", "IT HOLDS"))
    assert result.exit_code == 0, result.output
    assert "2 cases, nothing broken" in result.stdout


@pytest.mark.usefixtures("fake_host")
def test_a_choice_without_any_case_is_an_error_that_names_the_topics(monkeypatch: pytest.MonkeyPatch):
    result = selftest(monkeypatch, HOLDS, arguments=("--only", "nonsense"))
    assert result.exit_code != 0
    assert "'nonsense'" in result.stderr
    assert f"the topics are: {HOLDS.topic}" in result.stderr


@pytest.mark.usefixtures("fake_host")
def test_the_table_shows_verdict_and_detail_as_they_are(monkeypatch: pytest.MonkeyPatch):
    result = selftest(monkeypatch, BREAKS)
    [row] = [line for line in result.stdout.splitlines() if "it breaks" in line and "│" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == [
        "it breaks",
        "broken",
        "possible: [red]mount[/]",
    ]


@pytest.mark.usefixtures("fake_host")
def test_the_report_can_be_read_by_programs(monkeypatch: pytest.MonkeyPatch):
    report = json.loads(selftest(monkeypatch, HOLDS, BREAKS, FAILS, arguments=("--json",)).stdout)
    assert (report["driver"], report["security"], report["passed"]) == (FACTS.driver, True, False)
    verdicts = {row["name"]: (row["verdict"], row["advice"]) for row in report["cases"]}
    assert verdicts["it holds"] == ("held", None)
    assert verdicts["it breaks"] == ("broken", "Do something.")
    assert verdicts["it fails"] == ("failed", "Do something.")
    assert verdicts["nothing is left of the sandboxes"] == ("held", None)


@pytest.mark.usefixtures("fake_host")
def test_a_machine_that_survives_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "tree_of", lambda _pid: (ProcessId(1, 1), ProcessId(4711, 1)))
    monkeypatch.setattr(command, "is_alive", lambda _process: True)
    result = selftest(monkeypatch, HOLDS)
    assert result.exit_code == 1
    assert "processes 4711 still run" in result.stdout


def test_a_host_without_the_driver_gets_the_error_of_other_commands(tmp_path):
    where = ["--home", str(tmp_path)]
    result = CliRunner().invoke(app, [*where, "selftest", "--driver", "qemu"], env={"PATH": str(tmp_path)})
    assert result.exit_code == 1
    assert "This host cannot start sandboxes" in result.stderr
    assert "To fix it" in result.stderr


async def test_a_case_that_does_not_concern_the_driver_is_not_tried():
    exempt = Case("topic", "name", cannot_start, exempt=cases._one_user)
    result = await exempt.run(cast("Subject", SimpleNamespace(capabilities=WEAK)))
    assert (result.verdict, result.advice) == (Verdict.NOT_APPLICABLE, None)
    assert "same user" in result.detail


async def test_a_template_that_allows_namespaces_is_not_blamed_for_them():
    [namespaces] = [one for one in SECURITY if one.name == "code cannot create a user namespace"]
    allowing = SimpleNamespace(template=SimpleNamespace(user_namespaces=True))
    assert (await namespaces.run(cast("Subject", allowing))).verdict is Verdict.NOT_APPLICABLE


async def test_a_case_that_hangs_is_a_failure():
    async def hang(_: Subject) -> Outcome:
        await anyio.sleep_forever()
        raise AssertionError

    result = await replace(case(hang), limit_s=0.0).run(cast("Subject", SimpleNamespace(capabilities=VM)))
    assert result.verdict is Verdict.FAILED


async def test_an_attack_that_succeeds_breaks_its_case():
    outcome = await verdict_on('{"tried": 2, "succeeded": ["b"]}')
    assert (outcome.verdict, outcome.detail) == (Verdict.BROKEN, "as code: possible: b")


@pytest.mark.parametrize("printed", ["", "{", "[]", '{"tried": 1}', '{"tried": 0, "succeeded": []}', "1" * 100_000])
async def test_an_attack_without_a_proper_report_shows_nothing(printed: str):
    assert (await verdict_on(printed)).verdict is Verdict.FAILED


async def test_text_from_a_sandbox_is_printable_and_short():
    outcome = await verdict_on(json.dumps({"tried": 1, "succeeded": ["\x1b[2J\n" * 1000]}))
    assert outcome.verdict is Verdict.BROKEN
    assert outcome.detail.isprintable()
    assert len(outcome.detail) < MAX_DETAIL_CHARS + 50


async def test_the_attacks_are_copied_into_a_sandbox_and_the_sandbox_is_closed():
    provider = FakeProvider()
    async with fake_subject(provider) as subject:
        async with subject.fresh() as box:
            copied = {path.rpartition("/")[2] for path in provider.agent.files}
            assert {"__main__.py", "attempts.py", "privileges.py"} <= copied
            assert provider.alive == 1
        assert provider.alive == 0
        assert box.id not in [view.sandbox_id for view in subject.service.sandboxes(OWNER)]


async def test_a_shared_sandbox_that_was_lost_is_replaced():
    provider = FakeProvider()
    async with fake_subject(provider) as subject:
        first = await subject.shared()
        assert await subject.shared() is first
        provider.agent.plans["echo goes on"] = [finished("killed", "lost")]
        assert await subject.shared() is not first


def test_a_call_that_the_kernel_carries_out_is_reported():
    found = Attempts()
    found.call("getpid", GETPID)
    found.call("read", READ, -1 & 0xFFFF_FFFF)
    assert found.succeeded == ["getpid", f"read ({os.strerror(errno.EBADF)})"]


def test_a_call_that_does_not_exist_is_refused():
    found = Attempts()
    found.call("nothing", 100_000)
    found.action("no file", os.stat, "/nonexistent")
    assert (found.tried, found.succeeded) == (["nothing", "no file"], [])


def test_an_attack_is_a_program_that_prints_one_line_of_json():
    folder = Path(inside.__file__).parent
    argv = [sys.executable, "-m", "inside", "network", "find_devices", "[]"]
    done = subprocess.run(argv, cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"tried", "succeeded"}


def test_every_case_has_a_name_of_its_own_and_says_what_to_do():
    every = [*BASICS, *SECURITY]
    assert len({one.name for one in every}) == len(every)
    assert all(one.advice.endswith(".") for one in every)


def test_every_check_is_in_the_list():
    """A check that is written and not listed would never run."""
    listed = {one.check for one in (*BASICS, *SECURITY)}
    for module in (basics, bombs, trespasses):
        checks = [
            value
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        ]
        assert set(checks) <= listed, module.__name__
