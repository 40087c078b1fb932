"""Searches and pages over REST, with jobs that answer as the machine that reaches the web would."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from mcp_sandbox.config import Settings
from mcp_sandbox.views import PageView, SearchView
from tests.unit import test_fetch_tool, test_web_search
from tests.unit.fakes import FakeProvider
from tests.unit.rest_client import client_of, rest_over
from tests.unit.test_rest import problem
from websearch.jobs import JobFailed, Jobs

URL = test_fetch_tool.URL
PAGE = test_web_search.page(1)


@asynccontextmanager
async def client_with(
    jobs: Jobs, provider: FakeProvider | None = None, **settings: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    given = {"web": {"brave_key": "s3cret", "providers": ["brave"]}, **settings}
    async with rest_over(provider or FakeProvider(), Settings(**given), jobs) as app, client_of(app) as client:
        yield client


async def test_a_search_is_answered_with_what_was_found():
    jobs = test_web_search.FakeJobs(brave={"results": [PAGE]})
    async with client_with(jobs) as client:
        wanted = {"query": "snow", "max_results": 3, "page": 2, "site": "Example.org", "language": "PT-br"}
        answer = await client.post("/web/search", json={**wanted, "time_range": "week"})
    found = SearchView.model_validate(answer.json())
    assert [(result.url, result.engine) for result in found.results] == [("https://example.org/1", "brave")]
    asked = {name: jobs.fields[0][name] for name in ("query", "count", "page", "site", "language", "time_range")}
    assert asked == {
        "query": "snow",
        "count": 3,
        "page": 2,
        "site": "example.org",
        "language": "pt-BR",
        "time_range": "week",
    }


async def test_a_page_comes_in_parts():
    async with client_with(test_fetch_tool.FakeJobs("0123456789")) as client:
        answer = await client.post("/web/fetch", json={"url": URL, "max_chars": 4, "format": "text"})
        first = PageView.model_validate(answer.json())
        rest = (await client.post("/web/fetch", json={"url": URL, "start_index": first.next_start_index})).json()
    assert (first.text, first.next_start_index, first.total_chars) == ("0123", 4, 10)
    assert (rest["text"], rest["next_start_index"]) == ("456789", None)


async def test_a_download_is_saved_in_a_sandbox_of_the_caller():
    provider, data = FakeProvider(), bytes(range(256))
    jobs = test_fetch_tool.FakeJobs(None, data, kind="binary", content_type="application/zip")
    async with client_with(jobs, provider) as client:
        problem(await client.post("/web/fetch", json={"url": URL, "sandbox_id": "sb-none"}), 404, "sandbox_not_found")
        assert jobs.asked == []
        box = (await client.post("/sandboxes")).json()["sandbox_id"]
        saved = (await client.post("/web/fetch", json={"url": URL, "sandbox_id": box})).json()["saved"]
    assert provider.agent.files[saved["path"]] == data


async def test_a_download_without_a_sandbox_is_an_artifact_of_the_caller():
    data = bytes(range(256))
    jobs = test_fetch_tool.FakeJobs(None, data, kind="binary", content_type="application/zip")
    async with client_with(jobs) as client:
        page = PageView.model_validate((await client.post("/web/fetch", json={"url": URL})).json())
        assert page.artifact is not None
        kept = await client.get(f"/web/artifacts/{httpx2.URL(page.artifact.uri or '').host}")
        problem(await client.get("/web/artifacts/0123456789abcdef"), 404, "artifact_not_found")
    assert (kept.content, kept.headers["content-disposition"]) == (data, "attachment")


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/web/search", {}, "query"),
        ("/web/search", {"query": "x", "time_range": "decade"}, "time_range"),
        ("/web/search", {"query": "x", "site": "localhost"}, "site must be a domain"),
        ("/web/fetch", {"url": "file:///etc/passwd"}, "http:// or https://"),
        ("/web/fetch", {"url": "http://a:b@example.org/"}, "user name"),
        ("/web/fetch", {"url": URL, "format": "pdf"}, "format"),
        ("/web/fetch", {"url": URL, "max_chars": 0}, "max_chars"),
    ],
)
async def test_a_wrong_request_is_refused_before_anything_is_asked(path: str, body: dict[str, Any], names: str):
    jobs = test_fetch_tool.FakeJobs()
    async with client_with(jobs) as client:
        assert names in problem(await client.post(path, json=body), 400, "bad_request")["detail"]
    assert jobs.asked == []


async def test_a_failed_search_and_a_refused_page_are_problems():
    failing = test_web_search.FakeJobs(brave=JobFailed("key_refused", "s3cret"))
    async with client_with(failing) as client:
        told = problem(await client.post("/web/search", json={"query": "x"}), 502, "search_failed")
    assert "s3cret" not in str(told)
    jobs = test_fetch_tool.FakeJobs()
    jobs.failure = JobFailed("refused", "", {"rule": "address-private"})
    async with client_with(jobs) as client:
        told = problem(await client.post("/web/fetch", json={"url": URL}), 403, "fetch_refused")
    assert told["fields"]["rule"] == "address-private"


async def test_without_web_tools_there_is_no_web():
    async with client_with(test_fetch_tool.FakeJobs(), web_tools=False) as client:
        problem(await client.post("/web/search", json={"query": "x"}), 404, None)
        problem(await client.post("/web/fetch", json={"url": URL}), 404, None)
        assert not [path for path in (await client.get("/openapi.json")).json()["paths"] if "web" in path]
