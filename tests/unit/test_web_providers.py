"""Each search provider, asked by the guest's code through a real bridge: servers that answer as their documents say."""

import json
from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from guest.web.duckduckgo import region_of
from guest.web.providers import APIS, Query
from tests.web.local_jobs import LocalJobs, local_jobs
from tests.web.sites import trusting
from tests.web.world import World, forget_proxies
from websearch.access import Caller
from websearch.jobs import JobFailed
from websearch.providers import ENDPOINTS, KEY_HEADERS, Provider, make_provider, secrets_of
from websearch.search import Search, SearchRequest

pytestmark = pytest.mark.anyio

KEY = "s3cret-key"
ADA = Caller("ada", "web")
REQUEST = SearchRequest(query="snow & ice", max_results=3)
FILTERED = SearchRequest(query="snow", max_results=3, time_range="week", site="example.org", page=2, language="pt-BR")
ONE = {"title": "Snow", "url": "https://example.org/snow", "snippet": "white & cold"}

ANSWERS: dict[str, object] = {
    "searxng": {
        "results": [
            {"title": "Snow", "url": ONE["url"], "content": "white & cold", "engine": "bing", "publishedDate": None}
        ],
        "unresponsive_engines": [["google", "CAPTCHA"]],
    },
    "brave": {
        "web": {
            "results": [
                {
                    "title": "Snow",
                    "url": ONE["url"],
                    "description": "white &amp; cold",
                    "page_age": "2025-01-31T10:00:00",
                }
            ]
        }
    },
    "tavily": {"results": [{"title": "Snow", "url": ONE["url"], "content": "white & cold", "score": 0.9}]},
    "exa": {
        "results": [
            {
                "title": "Snow",
                "url": ONE["url"],
                "highlights": ["white & cold"],
                "publishedDate": "2025-01-31T10:00:00.000Z",
            }
        ]
    },
    "google": {
        "items": [
            {
                "title": "Snow",
                "link": ONE["url"],
                "snippet": "white & cold",
                "pagemap": {"metatags": [{"article:published_time": "2025-01-31T10:00:00Z"}]},
            }
        ]
    },
}
DUCKDUCKGO = """<html><body><div class="result results_links"><div class="links_main result__body">
<h2 class="result__title"><a href="https://example.org/snow">Snow</a></h2>
<a class="result__snippet" href="https://example.org/snow">white &amp; cold</a></div></div></body></html>"""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    forget_proxies(monkeypatch)
    return World()


class ProviderServer:
    """Answers every request in the same way, and keeps what it was asked."""

    def __init__(self, answer: object, status: str = "200 OK") -> None:
        self.body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.status = status
        self.heads: list[str] = []
        self.bodies: list[str] = []

    async def __call__(self, stream: ByteStream) -> None:
        buffered = BufferedByteReceiveStream(stream)
        head = (await buffered.receive_until(b"\r\n\r\n", 65536)).decode()
        length = next((int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:")), 0)
        self.heads.append(head)
        self.bodies.append((await buffered.receive_exactly(length)).decode() if length else "")
        await stream.send(f"HTTP/1.1 {self.status}\r\nContent-Length: {len(self.body)}\r\n\r\n".encode() + self.body)
        await stream.aclose()

    @property
    def path(self) -> str:
        return self.heads[0].split(" ")[1]

    @property
    def parameters(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query))


async def ask(
    world: World, name: str, server: ProviderServer, request: SearchRequest = REQUEST
) -> tuple[LocalJobs, object]:
    """Ask a provider that the tests serve over TLS; returns the jobs and the answer or the error."""
    async with world.site("site.test", server, secure=True) as address:
        provider = at(name, address)
        world.secrets, world.tls = secrets_of([provider]), trusting(world.authority)
        async with local_jobs(world) as jobs:
            with anyio.fail_after(60):
                fields = {**provider.fields, **request.model_dump(), "count": request.max_results}
                try:
                    return jobs, (await jobs.run("search", fields, caller=ADA, timeout_s=60)).header
                except JobFailed as error:
                    return jobs, error


def at(name: str, address: str) -> Provider:
    """Return a provider whose server is a site of the tests, with the path of the real one."""
    path = urlsplit(ENDPOINTS.get(name, "https://x/search")).path
    key = KEY if name in (*KEY_HEADERS, "google") else None
    return make_provider(name, endpoint=f"{address}{path}", key=key, engine_id="cx1")


@pytest.mark.parametrize("name", [*ANSWERS, "duckduckgo"])
async def test_a_providers_results_are_read(world, name):
    server = ProviderServer(ANSWERS.get(name, DUCKDUCKGO))
    _, answer = await ask(world, name, server)
    assert isinstance(answer, dict), answer
    (found,) = answer["results"]
    assert {key: found[key] for key in ONE} == ONE
    assert found.get("published", "")[:10] == ("2025-01-31" if name in ("brave", "exa", "google") else "")
    assert answer["errors"] == ([{"engine": "google", "error": "CAPTCHA"}] if name == "searxng" else [])


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        (
            "searxng",
            {"q": "snow site:example.org", "format": "json", "pageno": "2", "time_range": "week", "language": "pt-BR"},
        ),
        (
            "brave",
            {"q": "snow site:example.org", "count": "3", "offset": "1", "freshness": "pw", "search_lang": "pt-br"},
        ),
        (
            "google",
            {"q": "snow", "cx": "cx1", "num": "3", "start": "4", "dateRestrict": "w1", "siteSearch": "example.org"},
        ),
        ("google", {"siteSearchFilter": "i", "lr": "lang_pt", "key": KEY}),
    ],
)
async def test_filters_are_passed_in_the_address(world, name, sent):
    server = ProviderServer(ANSWERS[name])
    await ask(world, name, server, FILTERED)
    assert server.parameters | sent == server.parameters


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("tavily", {"query": "snow", "max_results": 6, "time_range": "week", "include_domains": ["example.org"]}),
        (
            "exa",
            {"query": "snow", "numResults": 6, "includeDomains": ["example.org"], "contents": {"highlights": True}},
        ),
    ],
)
async def test_filters_are_passed_in_the_body(world, name, sent):
    server = ProviderServer(ANSWERS[name])
    await ask(world, name, server, FILTERED)
    body = json.loads(server.bodies[0])
    assert body | sent == body
    assert name != "exa" or body["startPublishedDate"].endswith("Z")


@pytest.mark.parametrize(
    ("language", "brave", "google"),
    [
        ("de", "de", "lang_de"),
        ("de-AT", "de", "lang_de"),
        ("ja", "jp", "lang_ja"),
        ("pt-PT", "pt-pt", "lang_pt"),
        ("zh-HK", "zh-hant", "lang_zh-TW"),
        ("zh-CN", "zh-hans", "lang_zh-CN"),
    ],
)
def test_a_language_is_named_as_the_provider_names_it(language, brave, google):
    fields = {"query": "snow", "count": 1, "page": 1, "endpoint": "https://x.test/", "language": language}
    sent = {name: APIS[name].request(Query.of({**fields, "provider": name})).url.params for name in ("brave", "google")}
    assert (sent["brave"]["search_lang"], sent["google"]["lr"]) == (brave, google)


async def test_duckduckgo_gets_a_form(world):
    server = ProviderServer(DUCKDUCKGO)
    await ask(world, "duckduckgo", server, FILTERED)
    assert dict(parse_qsl(server.bodies[0])) == {"q": "snow site:example.org", "l": "br-pt", "s": "10", "df": "w"}
    assert [region_of(language) for language in (None, "en", "de-AT")] == ["wt-wt", "wt-wt", "at-de"]


@pytest.mark.parametrize("name", ["brave", "tavily", "exa", "google"])
async def test_the_provider_sees_the_key_and_the_guest_only_a_placeholder(world, name):
    server = ProviderServer(ANSWERS[name])
    jobs, _ = await ask(world, name, server)
    assert KEY in server.heads[0]
    assert KEY not in server.bodies[0]
    assert KEY not in repr(jobs.sent)
    assert jobs.sent[0]["key"] in repr(jobs.sent)
    assert jobs.sent[0]["key"] not in server.heads[0]
    assert "proxy-authorization" not in server.heads[0].lower()


async def test_another_host_never_gets_the_key(world):
    server = ProviderServer(ANSWERS["brave"])
    async with world.site("other.test", server, secure=True) as address:
        elsewhere = at("brave", address)
        provider = replace(elsewhere, endpoint=elsewhere.endpoint.replace("other.test", "site.test"))
        world.secrets, world.tls = secrets_of([provider]), trusting(world.authority)
        async with local_jobs(world) as jobs:
            fields = {**elsewhere.fields, **REQUEST.model_dump(), "count": 3}
            with pytest.raises(JobFailed) as caught:
                await jobs.run("search", fields, caller=ADA, timeout_s=60)
    assert (caught.value.code, caught.value.fields["rule"]) == ("refused", "scheme")
    assert server.heads == []


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("searxng", "403 Forbidden", "no_json"),
        ("searxng", "429 Too Many Requests", "rate_limited"),
        ("brave", "401 Unauthorized", "key_refused"),
        ("exa", "402 Payment Required", "rate_limited"),
        ("tavily", "432 Plan Limit", "rate_limited"),
        ("google", "500 Oops", "http_status"),
        ("duckduckgo", "202 Accepted", "rate_limited"),
        ("searxng", "200 OK", "bad_response"),
        ("brave", "200 OK", "bad_response"),
    ],
)
async def test_a_provider_that_does_not_answer_says_why(world, name, status, code):
    _, error = await ask(world, name, ProviderServer("[1, 2]", status))
    assert isinstance(error, JobFailed)
    assert error.code == code


async def test_an_endless_answer_is_cut_off(world):
    _, error = await ask(world, "searxng", ProviderServer("x" * 5_000_000))
    assert isinstance(error, JobFailed)
    assert error.code == "too_large"


@pytest.mark.parametrize(("name", "page"), [("brave", 11), ("tavily", 8), ("exa", 35), ("google", 34)])
async def test_a_page_beyond_the_last_one_is_not_asked_for(world, name, page):
    server = ProviderServer(ANSWERS[name])
    _, error = await ask(world, name, server, REQUEST.model_copy(update={"page": page}))
    assert isinstance(error, JobFailed)
    assert error.code == "no_such_page"
    assert server.heads == []


async def test_search_falls_over_to_a_provider_that_answers(world):
    failing, answering = ProviderServer("no", "500 Oops"), ProviderServer(ANSWERS["searxng"])
    async with (
        world.site("site.test", failing, secure=True) as brave_address,
        world.site("other.test", answering) as searxng_address,
    ):
        brave = at("brave", brave_address)
        searxng = make_provider("searxng", endpoint=f"{searxng_address}/search")
        world.secrets, world.tls = secrets_of([brave]), trusting(world.authority)
        async with local_jobs(world) as jobs:
            with anyio.fail_after(60):
                answer = await Search(jobs, [brave, searxng]).search(REQUEST, ADA)
    assert answer.providers == ("searxng",)
    assert [(error.engine, error.code) for error in answer.errors] == [
        ("brave", "http_status"),
        ("google", "engine_failed"),
    ]
    assert (answer.results[0].url, answer.results[0].engine, answer.partial) == (ONE["url"], "searxng/bing", True)
