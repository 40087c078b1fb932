"""Asks DuckDuckGo, which needs no API key: `ddgs` knows its pages.

The requests are our own. The client of `ddgs` imitates a browser down to its TLS handshake, with an encrypted
ClientHello, which the bridge refuses because it hides the server's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from ddgs.engines.duckduckgo import Duckduckgo
from lxml.etree import LxmlError

from guest.web.errors import WebError
from guest.web.providers import Query, Result, result

ANY_REGION = "wt-wt"
TIME_RANGES = {"day": "d", "week": "w", "month": "m", "year": "y"}

Send = Callable[[httpx.Request], tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class _Page:
    status_code: int
    text: str


class _Client:
    """What `ddgs` expects of an HTTP client."""

    def __init__(self, send: Send, endpoint: str) -> None:
        self._send = send
        self._endpoint = endpoint

    def request(self, method: str, _url: str, *, data: Mapping[str, str]) -> _Page:
        status, body = self._send(httpx.Request(method, self._endpoint, data=data))
        if status != httpx.codes.OK:  # 202 is a question whether a human asks
            raise WebError("rate_limited", "it does not answer programs at the moment", status=status)
        return _Page(status, body.decode(errors="replace"))


class _Engine(Duckduckgo):
    """The engine of `ddgs`, with our client."""

    def __init__(self, client: _Client | None = None) -> None:
        self.http_client: Any = client


def ask(query: Query, send: Send) -> str:
    """Return a page of results as it came."""
    engine = _Engine(_Client(send, query.endpoint))
    payload = engine.build_payload(
        query=query.words,
        region=region_of(query.language),
        safesearch="moderate",
        timelimit=TIME_RANGES.get(query.time_range or ""),
        page=query.page,
    )
    return engine.request(engine.search_method, query.endpoint, data=payload) or ""


def read(page: str) -> list[Result]:
    """Return the results in a page. Runs without a network."""
    engine = _Engine()
    try:
        found = engine.post_extract_results(engine.extract_results(page)) if page else []
    except (LxmlError, ValueError) as error:
        raise WebError("bad_response", "its page cannot be read") from error
    return [result(item.title, item.href, item.body) for item in found]


def region_of(language: str | None) -> str:
    """Return DuckDuckGo's name of a language in a country, such as br-pt for pt-BR."""
    words, _, country = (language or "").lower().partition("-")
    return f"{country}-{words}" if country else ANY_REGION
