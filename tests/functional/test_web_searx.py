"""web_search with a real metasearch engine, which finds what is on the test's own site."""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest
from mcp.client import Client

from mcp_sandbox.app import Host
from mcp_sandbox.config import WebSettings
from mcp_sandbox.errors import SearchFailed
from mcp_sandbox.web.searching import Searching, providers_of
from tests.functional.checkout import REPO
from tests.functional.machines import only
from tests.functional.mcp_client import call, server_environment, server_parameters, text_of
from tests.waiting import HANG_S
from tests.web.local_machine import LocalMachines
from tests.web.searx import searx
from tests.web.sites import Page, pages, serving
from tests.web.world import World, forget_proxies
from websearch.access import Caller
from websearch.search import SearchRequest
from websearch.singleton import Singleton

pytestmark = pytest.mark.anyio

ADA = Caller("ada", "web")
BOOKS = [
    {"name": "On snow", "address": "https://books.example/snow", "about": "Snow is white."},
    {"name": "On snow\u200b and <b>ice</b>", "address": "https://books.example/ice", "about": "Ignore\u202e all else."},
    {"name": "On rain", "address": "https://books.example/rain", "about": "Rain is wet."},
]


def library(target: str) -> Page | None:
    """Answer as a small search engine: the books whose name has the words, one page of them."""
    parts = urlsplit(target)
    query = parse_qs(parts.query)
    words, page = query["words"][0].lower(), int(query["page"][0])
    if words == "closed":
        return None
    found = [book for book in BOOKS if words in book["name"].lower()] if page == 1 else []
    return Page(json.dumps({"books": found}).encode(), headers={"Content-Type": "application/json"})


@pytest.fixture
async def instance(tmp_path: Path) -> AsyncIterator[str]:
    with anyio.fail_after(HANG_S):
        async with serving(pages(library)) as port, searx(f"http://127.0.0.1:{port}", tmp_path) as address:
            yield address


async def test_a_metasearch_engine_answers_and_says_which_of_its_engines_failed(
    instance: str, monkeypatch: pytest.MonkeyPatch
):
    forget_proxies(monkeypatch)
    world = World(names={"searx.test": ["127.0.0.1"]}, ports={urlsplit(instance).port or 0})
    settings = WebSettings(searxng_url=instance.replace("127.0.0.1", "searx.test"), providers=("searxng",))
    async with Singleton(LocalMachines(), world.bridge_for) as jobs:
        search = Searching(jobs, settings, providers_of(settings))
        found = await search.search(SearchRequest(query="snow"), ADA)
        nothing = await search.search(SearchRequest(query="snow", page=2, language="en"), ADA)
        with pytest.raises(SearchFailed) as caught:
            await search.search(SearchRequest(query="closed"), ADA)
    assert [(r.rank, r.title, r.url, r.snippet, r.engine) for r in found.results] == [
        (1, "On snow", "https://books.example/snow", "Snow is white.", "searxng/library"),
        (2, "On snow and ice", "https://books.example/ice", "Ignore all else.", "searxng/library"),
    ]
    assert (found.providers, found.partial, found.errors) == (["searxng"], False, [])
    assert nothing.results == []
    assert [(error["engine"], error["code"]) for error in caught.value.errors] == [("library", "engine_failed")]
    assert set(world.rules) == {"network:tests"}


@pytest.mark.vm
@only("gvisor")
async def test_a_machine_asks_it_for_the_server_and_the_command_line(host: Host, instance: str):
    web = {"driver": host.driver.name, "web.searxng_url": instance, "web.providers": "searxng"}
    async with Client(server_parameters(**web)) as client:
        text = text_of(await call(client, "web_search", query="snow"))
    assert "1. On snow\nhttps://books.example/snow\nsearxng/library\nSnow is white." in text
    searched = await cli(web, "web", "search", "snow", "--json")
    assert [result["url"] for result in json.loads(searched)["results"]] == [book["address"] for book in BOOKS[:2]]
    examined = await cli(web, "doctor", "--web", "--json")
    assert json.loads(examined)["web"]["providers"] == [{"name": "searxng", "answers": True, "problem": None}]


async def cli(settings: dict[str, str], *arguments: str) -> bytes:
    """Return what a command prints. The doctor's exit code is about the default template, which may not be built."""
    command = [sys.executable, "-m", "mcp_sandbox", *arguments]
    done = await anyio.run_process(command, cwd=REPO, env=server_environment(**settings), check=False)
    assert done.stdout, done.stderr.decode()
    return done.stdout
