"""The search APIs: how each one is asked, and how its answer is read."""

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import httpx

from guest.web.errors import WebError
from guest.web.keyed import SCHEME

DAYS = {"day": 1, "week": 7, "month": 31, "year": 366}
BRAVE_FRESHNESS = {"day": "pd", "week": "pw", "month": "pm", "year": "py"}
GOOGLE_DATES = {"day": "d1", "week": "w1", "month": "m1", "year": "y1"}
# Languages that an API calls by another name than ISO 639-1.
BRAVE_LANGUAGES = {
    "ja": "jp",
    "no": "nb",
    "pt": "pt-br",
    "zh": "zh-hans",
    "en-GB": "en-gb",
    "pt-PT": "pt-pt",
    "zh-TW": "zh-hant",
    "zh-HK": "zh-hant",
}
GOOGLE_LANGUAGES = {"zh": "zh-CN", "zh-TW": "zh-TW", "zh-HK": "zh-TW"}
# The most results that an API gives at once, and in all.
BRAVE_COUNT, BRAVE_PAGES = 20, 10
GOOGLE_COUNT, GOOGLE_RESULTS = 10, 100
TAVILY_RESULTS = 20
EXA_RESULTS = 100

Result = dict[str, str]


@dataclass(frozen=True, slots=True)
class Query:
    """What to ask a provider. `endpoint` is its address, `key` a placeholder for its API key."""

    provider: str
    query: str
    count: int
    page: int
    endpoint: str
    time_range: str | None = None
    site: str | None = None
    language: str | None = None
    key: str = ""
    engine_id: str = ""  # Google's cx

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Query":
        """Return the query that a job's fields describe."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    @property
    def words(self) -> str:
        """The query with its site, for providers that know the operator `site:`."""
        return f"{self.query} site:{self.site}" if self.site else self.query

    def language_in(self, names: Mapping[str, str]) -> str:
        """Return the language without its country, or as an API names it."""
        language = self.language or ""
        name = language.partition("-")[0]
        return names.get(language) or names.get(name, name)


@dataclass(slots=True)
class Found:
    """What a provider answered."""

    results: list[Result]
    errors: list[Result] = field(default_factory=list)  # of the engines behind it


class Api(NamedTuple):
    """How a provider is asked, and how its JSON is read."""

    request: Callable[[Query], httpx.Request]
    parse: Callable[[Any, Query], Found]


def result(title: object, url: object, snippet: object, published: object = None, engine: object = None) -> Result:
    """Return a result; what a provider left out is empty."""
    names = ("title", "url", "snippet", "published", "engine")
    values = (title, url, snippet, published, engine)
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, str) and value}


def no_such_page(pages: str) -> WebError:
    """Return the error for a page that a provider does not have."""
    return WebError("no_such_page", f"it has no more than {pages}")


def _get(url: str, query: dict[str, str | int | None], **headers: str) -> httpx.Request:
    wanted = {name: value for name, value in query.items() if value is not None}
    return httpx.Request("GET", url, params=wanted, headers={"Accept": "application/json", **headers})


def _keyed(query: Query) -> str:
    return query.endpoint.replace("https", SCHEME, 1)


# -- SearXNG and searx -----------------------------------------------------------------------------------------


def _searxng_request(query: Query) -> httpx.Request:
    return _get(
        query.endpoint,
        {
            "q": query.words,
            "format": "json",
            "pageno": query.page,
            "time_range": query.time_range,
            "language": query.language,
        },
    )


def _searxng_parse(answer: Any, _query: Query) -> Found:  # noqa: ANN401 - whatever JSON the server sent
    found = [
        result(r.get("title"), r.get("url"), r.get("content"), r.get("publishedDate"), r.get("engine"))
        for r in answer["results"]
    ]
    silent = [{"engine": str(name), "error": str(why)} for name, why, *_ in answer.get("unresponsive_engines", [])]
    return Found(found, silent)


# -- Brave -----------------------------------------------------------------------------------------------------


def _brave_request(query: Query) -> httpx.Request:
    if query.page > BRAVE_PAGES:
        raise no_such_page(f"{BRAVE_PAGES} pages")
    parameters: dict[str, str | int | None] = {
        "q": query.words,
        "count": min(query.count, BRAVE_COUNT),
        "offset": query.page - 1,  # in pages
        "freshness": BRAVE_FRESHNESS.get(query.time_range or ""),
        "search_lang": query.language and query.language_in(BRAVE_LANGUAGES),
        "text_decorations": "false",
        "result_filter": "web",
    }
    request = _get(_keyed(query), parameters)
    request.headers["X-Subscription-Token"] = query.key
    return request


def _brave_parse(answer: Any, _query: Query) -> Found:  # noqa: ANN401
    found = (answer.get("web") or {}).get("results", [])
    return Found(
        [
            result(
                html.unescape(r.get("title") or ""),
                r.get("url"),
                html.unescape(r.get("description") or ""),
                r.get("page_age"),
            )
            for r in found
        ]
    )


# -- Tavily ----------------------------------------------------------------------------------------------------


def _tavily_request(query: Query) -> httpx.Request:
    wanted = _up_to(query, TAVILY_RESULTS)
    body = {"query": query.query, "max_results": wanted, "time_range": query.time_range}
    if query.site:
        body["include_domains"] = [query.site]
    return _post(query, body, {"Authorization": f"Bearer {query.key}"})


def _tavily_parse(answer: Any, query: Query) -> Found:  # noqa: ANN401
    found = [result(r.get("title"), r.get("url"), r.get("content"), r.get("published_date")) for r in answer["results"]]
    return Found(_page(found, query))


# -- Exa -------------------------------------------------------------------------------------------------------


def _exa_request(query: Query) -> httpx.Request:
    body: dict[str, Any] = {
        "query": query.query,
        "numResults": _up_to(query, EXA_RESULTS),
        "contents": {"highlights": True},
    }
    if query.site:
        body["includeDomains"] = [query.site]
    if query.time_range:
        since = datetime.now(UTC) - timedelta(days=DAYS[query.time_range])
        body["startPublishedDate"] = since.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return _post(query, body, {"x-api-key": query.key})


def _exa_parse(answer: Any, query: Query) -> Found:  # noqa: ANN401
    found = [
        result(r.get("title"), r.get("url"), " … ".join(r.get("highlights") or ()), r.get("publishedDate"))
        for r in answer["results"]
    ]
    return Found(_page(found, query))


# -- Google Programmable Search --------------------------------------------------------------------------------


def _google_request(query: Query) -> httpx.Request:
    count = min(query.count, GOOGLE_COUNT)
    start = (query.page - 1) * count + 1
    if start + count - 1 > GOOGLE_RESULTS:
        raise no_such_page(f"{GOOGLE_RESULTS} results")
    return _get(
        _keyed(query),
        {
            "key": query.key,
            "cx": query.engine_id,
            "q": query.query,
            "num": count,
            "start": start,
            "dateRestrict": GOOGLE_DATES.get(query.time_range or ""),
            "siteSearch": query.site,
            "siteSearchFilter": "i" if query.site else None,
            "lr": f"lang_{query.language_in(GOOGLE_LANGUAGES)}" if query.language else None,
        },
    )


def _google_parse(answer: Any, _query: Query) -> Found:  # noqa: ANN401
    return Found(
        [
            result(r.get("title"), r.get("link"), r.get("snippet"), _google_date(r.get("pagemap", {})))
            for r in answer.get("items", [])
        ]
    )


def _google_date(pagemap: dict[str, Any]) -> object:
    tags = (pagemap.get("metatags") or [{}])[0]
    return tags.get("article:published_time") or tags.get("og:updated_time")


# -- shared ----------------------------------------------------------------------------------------------------


def _post(query: Query, body: Mapping[str, Any], headers: dict[str, str]) -> httpx.Request:
    wanted = {name: value for name, value in body.items() if value is not None}
    return httpx.Request("POST", _keyed(query), json=wanted, headers=headers)


def _up_to(query: Query, most: int) -> int:
    """Return how many results to ask for if an API has no pages: all up to the end of the one wanted."""
    if (query.page - 1) * query.count >= most:
        raise no_such_page(f"{most} results")
    return min(query.page * query.count, most)


def _page(found: list[Result], query: Query) -> list[Result]:
    return found[(query.page - 1) * query.count :]


APIS: dict[str, Api] = {
    "searxng": Api(_searxng_request, _searxng_parse),
    "brave": Api(_brave_request, _brave_parse),
    "tavily": Api(_tavily_request, _tavily_parse),
    "exa": Api(_exa_request, _exa_parse),
    "google": Api(_google_request, _google_parse),
}
