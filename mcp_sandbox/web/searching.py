"""Web searches for callers: arguments are checked, answers become views, errors get their codes."""

import re

from mcp_sandbox.config import WebSettings
from mcp_sandbox.errors import BadRequest, SearchFailed, SearchNotSetUp
from mcp_sandbox.views import SearchErrorView, SearchResultView, SearchView
from websearch import search
from websearch.access import Caller
from websearch.authority import BadAuthority, normalise_name
from websearch.found import EngineError, Found
from websearch.jobs import Jobs
from websearch.providers import Provider, ProviderName, make_provider
from websearch.search import Search, SearchAnswer, SearchRequest
from websearch.text import one_line

MAX_QUERY = 400  # characters; Brave takes no more
MAX_RESULTS = 20
MAX_PAGE = 20
LANGUAGE = re.compile(r"([a-z]{2,3})(?:[-_]([a-z]{2}))?", re.IGNORECASE)


def providers_of(settings: WebSettings) -> list[Provider]:
    """Return the providers to ask, in order."""
    return [_provider(settings, name) for name in settings.search_providers]


def _provider(settings: WebSettings, name: ProviderName) -> Provider:
    if name == "searxng":
        return make_provider(name, endpoint=f"{settings.searxng_url}/search")
    keys = {
        "brave": settings.brave_key,
        "tavily": settings.tavily_key,
        "exa": settings.exa_key,
        "google": settings.google_key,
    }
    key = keys.get(name)
    engine_id = settings.google_cx or "" if name == "google" else ""
    return make_provider(name, key=key.get_secret_value() if key else None, engine_id=engine_id)


def checked(request: SearchRequest) -> SearchRequest:
    """Return a request in canonical form. Raises BadRequest."""
    query = one_line(request.query, MAX_QUERY)
    if not query:
        raise BadRequest("The query is empty.")
    return request.model_copy(
        update={"query": query, "site": _site(request.site), "language": _language(request.language)}
    )


def _site(site: str | None) -> str | None:
    if not site:
        return None
    try:
        name = normalise_name(site)
    except BadAuthority as error:
        raise BadRequest("site must be a domain such as example.org.") from error
    if "." not in name:
        raise BadRequest("site must be a domain such as example.org.")
    return name


def _language(language: str | None) -> str | None:
    if not language:
        return None
    parts = LANGUAGE.fullmatch(language)
    if parts is None:
        raise BadRequest("language must be a code such as en or pt-BR.")
    return parts[1].lower() + (f"-{parts[2].upper()}" if parts[2] else "")


class Searching:
    """Searches the web with the providers of the settings."""

    def __init__(self, jobs: Jobs, settings: WebSettings, providers: list[Provider]) -> None:
        self._search = Search(
            jobs, providers, merge=settings.merge, cache_s=settings.cache_s, certificates=settings.certificates()
        )

    async def search(self, request: SearchRequest, caller: Caller) -> SearchView:
        """Search the web.

        Raises:
            BadRequest, SearchNotSetUp, SearchFailed: as their names say.
            JobFailed: there is no machine that reaches the web.
        """
        request = checked(request)
        try:
            return _view(request, await self._search.search(request, caller))
        except search.NoProvider as error:
            raise SearchNotSetUp from error
        except search.SearchFailed as error:
            problems = dict.fromkeys(f"{each.provider}: {_problem(each)}" for each in error.errors)
            raise SearchFailed("; ".join(problems), [_error(each).model_dump() for each in error.errors]) from error

    async def probe(self, caller: Caller) -> dict[str, str | None]:
        """Ask every provider; returns what is wrong with each, or None. Raises JobFailed."""
        verdicts = await self._search.probe(caller)
        return {name: None if error is None else _problem(error) for name, error in verdicts.items()}


def _problem(error: EngineError) -> str:
    """Return a phrase about an error without words of a provider."""
    return "a search engine behind the provider failed" if error.code == "engine_failed" else error.message


def _view(request: SearchRequest, answer: SearchAnswer) -> SearchView:
    return SearchView(
        query=request.query,
        page=request.page,
        results=[_result(found) for found in answer.results],
        providers=list(answer.providers),
        partial=answer.partial,
        errors=[_error(error) for error in answer.errors],
        cached=answer.cached,
    )


def _result(found: Found) -> SearchResultView:
    return SearchResultView(
        rank=found.rank,
        title=found.title,
        url=found.url,
        snippet=found.snippet,
        published=found.published,
        engine=found.engine,
    )


def _error(error: EngineError) -> SearchErrorView:
    return SearchErrorView(engine=error.engine, code=error.code, message=error.message)
