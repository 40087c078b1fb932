"""`mcp-sandbox web search` and `mcp-sandbox doctor --web`, with jobs that answer as a machine would."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mcp_sandbox.commands import doctor_view, doctor_web, web_search
from mcp_sandbox.commands.doctor_report import WebReport
from mcp_sandbox.config import Settings, WebSettings
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.web.searching import providers_of
from mcp_sandbox.web.web import Web
from tests.unit.fakes import FakeProvider
from tests.unit.test_web_search import FakeJobs, page
from websearch.jobs import JobFailed
from websearch.search import SearchRequest

REQUEST = SearchRequest(query="snow")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, web=WebSettings(brave_key="s3cret", exa_key="s3cret", providers=("brave", "exa")))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> FakeJobs:
    """Jobs whose answers a test sets."""
    jobs = FakeJobs()

    @asynccontextmanager
    async def host(_settings: Settings) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def service(_host: None, *, pooled: bool) -> AsyncIterator[SandboxService]:
        assert not pooled
        web = Web(jobs, settings.web, providers_of(settings.web))
        async with SandboxService(FakeProvider(), settings, web=web) as opened:
            yield opened

    for module in (web_search, doctor_web):
        monkeypatch.setattr(module, "open_host", host)
        monkeypatch.setattr(module, "open_service", service)
    return jobs


def test_results_are_printed_and_failures_are_on_stderr(settings, jobs, capsys):
    jobs.answers = {"brave": JobFailed("rate_limited", ""), "exa": {"results": [page(1, title="[bold]Snow")]}}
    assert web_search.main(settings, REQUEST, as_json=False) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["1. [bold]Snow", "   https://example.org/1", "   text (exa)"]
    assert "brave did not answer: its rate limit or quota is used up" in printed.err


def test_results_are_printed_as_json(settings, jobs, capsys):
    jobs.answers = {"brave": {"results": [page(1)]}}
    assert web_search.main(settings, REQUEST, as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(result["rank"], result["url"]) for result in printed["results"]] == [(1, "https://example.org/1")]


def test_a_failed_search_names_the_next_step(settings, jobs, capsys):
    jobs.answers = dict.fromkeys(("brave", "exa"), JobFailed("key_refused", ""))
    assert web_search.main(settings, REQUEST, as_json=False) == 1
    printed = capsys.readouterr().err
    assert "brave: it refuses the API key" in printed
    assert "`mcp-sandbox doctor --web` asks each provider." in printed
    assert "s3cret" not in printed


@pytest.mark.anyio
async def test_doctor_says_which_provider_answers(settings, jobs):
    jobs.answers = {"brave": {"results": [page(1)]}, "exa": JobFailed("key_refused", "")}
    report = await doctor_web.examine_web(settings, ask=True)
    assert [(p.name, p.answers, p.problem) for p in report.providers] == [
        ("brave", True, None),
        ("exa", False, "it refuses the API key"),
    ]


@pytest.mark.anyio
async def test_doctor_says_why_no_provider_could_be_asked(settings, jobs):
    jobs.answers = dict.fromkeys(("brave", "exa"), JobFailed("unavailable", "no machine"))
    report = await doctor_web.examine_web(settings, ask=True)
    assert "The web cannot be reached: no machine." in (report.problem or "")
    assert [p.answers for p in report.providers] == [None, None]


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"providers": []}, "set web.searxng_url or an API key"),
        ({"providers": [{"name": "brave"}]}, "mcp-sandbox doctor --web"),
        ({"providers": [{"name": "brave", "answers": True}]}, "answers"),
        ({"providers": [{"name": "brave", "answers": False, "problem": "[it] is late"}]}, "[it] is late"),
        ({"providers": [{"name": "brave"}], "problem": "no machine"}, "no machine"),
    ],
)
def test_doctor_prints_what_it_knows_about_web_search(report, words, capsys):
    doctor_view._show_web(WebReport.model_validate(report))
    assert words in capsys.readouterr().out
