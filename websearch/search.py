"""Searches the web: asks providers in turn or all at once, checks what they found, and merges it.

Each provider is asked by a job of its own in the machine that reaches the web. What comes back is untrusted.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import anyio
from pydantic import BaseModel, ConfigDict

from websearch.access import Caller
from websearch.cache import ExpiringCache
from websearch.found import EngineError, Found, merged, parse_errors, parse_results, renumbered, within
from websearch.jobs import JobFailed, Jobs
from websearch.providers import Provider

PROVIDER_S = 12.0  # for one provider's answer; it includes the wait for a free worker
SEARCH_S = 40.0  # for all of them: many clients give up on a call after 60 s
CACHED = 256  # answers
NO_MACHINE = "unavailable"  # the code of a job that found no machine: no other provider can help

RULE = re.compile(r"[a-z0-9:.*_-]{1,100}")
WORDS = {
    "bad_response": "its answer is not what its API promises",
    "bad_url": "its address is not valid",
    "dns": "its name cannot be resolved",
    "failed": "it could not be asked",
    "http_status": "it answers with status {status}",
    "key_refused": "it refuses the API key",
    "no_json": "it refuses to answer in JSON",
    "no_such_page": "it has no such page",
    "rate_limited": "its rate limit or quota is used up",
    "refused": "the policy of this server refuses the connection (rule {rule})",
    "timeout": "it does not answer in time",
    "tls": "its certificate is not valid",
    "too_large": "its answer is too large",
    "unreachable": "it cannot be reached",
    "worker": "the process that asked it ended",
}

TimeRange = Literal["day", "week", "month", "year"]


class NoProvider(Exception):
    """No search provider is set up."""


class SearchFailed(Exception):
    """No provider answered; `errors` say why."""

    def __init__(self, errors: Sequence[EngineError]) -> None:
        super().__init__("no search provider answered")
        self.errors = tuple(errors)


class SearchRequest(BaseModel):
    """What to search for."""

    model_config = ConfigDict(frozen=True)

    query: str
    max_results: int = 8
    time_range: TimeRange | None = None
    site: str | None = None  # a domain; names below it count
    page: int = 1
    language: str | None = None  # such as en or pt-BR


PROBE = SearchRequest(query="encyclopedia", max_results=1)  # every provider finds something


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """What was found, by which providers, and what went wrong on the way."""

    results: tuple[Found, ...]
    providers: tuple[str, ...]
    errors: tuple[EngineError, ...] = ()
    partial: bool = False  # an engine that was asked, and could have found more, did not answer
    cached: bool = False


class Search:
    """Searches with the providers that are set up."""

    def __init__(
        self,
        jobs: Jobs,
        providers: Sequence[Provider],
        *,
        merge: bool = False,
        cache_s: float = 300.0,
        certificates: str | None = None,  # of further authorities, for a search engine of the operator's own
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._jobs = jobs
        self._certificates = certificates
        self._providers = tuple(providers)
        self._merge = merge
        self._cache: ExpiringCache[tuple[str, SearchRequest], SearchAnswer] = ExpiringCache(cache_s, CACHED)

    async def search(self, request: SearchRequest, caller: Caller) -> SearchAnswer:
        """Return the results of the first provider that answers, or of all of them.

        Raises:
            NoProvider: there is none.
            SearchFailed: none answered.
            JobFailed: there is no machine that reaches the web.
        """
        if not self._providers:
            raise NoProvider
        key = caller.owner, request  # whether others have searched for it is nobody's business
        if (kept := self._cache.get(key)) is not None:
            return replace(kept, cached=True)
        answer = await (self._ask_all(request, caller) if self._merge else self._ask_in_turn(request, caller))
        if not answer.errors:  # a provider that failed is worth another try
            self._cache.put(key, answer)
        return answer

    async def probe(self, caller: Caller) -> dict[str, EngineError | None]:
        """Ask every provider one question; returns why each did not answer, or None if it did. Raises JobFailed."""
        verdicts: dict[str, EngineError | None] = {provider.name: None for provider in self._providers}
        for provider in self._providers:
            try:
                found, silent = await self._ask(provider, PROBE, caller)
            except EngineError as error:
                verdicts[provider.name] = error
            else:
                verdicts[provider.name] = silent[0] if silent and not found else None
        return verdicts

    async def _ask_in_turn(self, request: SearchRequest, caller: Caller) -> SearchAnswer:
        errors: list[EngineError] = []
        end = self._clock() + SEARCH_S
        for provider in self._providers:
            if errors and self._clock() + PROVIDER_S > end:
                errors.append(EngineError(provider.name, "not_asked", "it was not asked: the others took too long"))
                continue
            try:
                found, silent = await self._ask(provider, request, caller)
            except EngineError as error:
                errors.append(error)
                continue
            if not found and silent:  # every engine behind it may have failed
                errors += silent
                continue
            results = renumbered(found[: request.max_results])
            return SearchAnswer(results, (provider.name,), (*errors, *silent), partial=bool(silent))
        raise SearchFailed(errors)

    async def _ask_all(self, request: SearchRequest, caller: Caller) -> SearchAnswer:
        answers: dict[str, Sequence[Found]] = {}
        errors: list[EngineError] = []
        failed: list[JobFailed] = []

        async def ask(provider: Provider) -> None:
            try:
                answers[provider.name], silent = await self._ask(provider, request, caller)
            except EngineError as error:
                errors.append(error)
            except JobFailed as error:
                failed.append(error)
            else:
                errors.extend(silent)

        async with anyio.create_task_group() as tasks:
            for provider in self._providers:
                tasks.start_soon(ask, provider)
        if failed:
            raise failed[0]
        if not answers or (errors and not any(answers.values())):
            raise SearchFailed(errors)
        lists = {provider.name: answers[provider.name] for provider in self._providers if provider.name in answers}
        return SearchAnswer(merged(lists)[: request.max_results], tuple(lists), tuple(errors), partial=bool(errors))

    async def _ask(
        self, provider: Provider, request: SearchRequest, caller: Caller
    ) -> tuple[list[Found], list[EngineError]]:
        """Return what one provider found, and the errors of engines behind it. Raises EngineError, JobFailed."""
        try:
            answer = await self._jobs.run(
                "search",
                _job(provider, request) | {"certificates": self._certificates},
                caller=caller,
                timeout_s=PROVIDER_S,
            )
        except JobFailed as error:
            if error.code == NO_MACHINE:
                raise
            raise _engine_error(provider, error) from error
        found = parse_results(answer.header.get("results"), provider.name)
        if request.site is not None:
            found = [result for result in found if within(result.url, request.site)]
        return found, parse_errors(answer.header.get("errors"), provider.name)


def _job(provider: Provider, request: SearchRequest) -> dict[str, Any]:
    return {
        **provider.fields,
        "query": request.query,
        "count": request.max_results,
        "page": request.page,
        "time_range": request.time_range,
        "site": request.site,
        "language": request.language,
    }


def _engine_error(provider: Provider, error: JobFailed) -> EngineError:
    """Return why a provider did not answer, in our own words: a worker's would reach the model as if they were ours."""
    code = error.code if error.code in WORDS else "failed"
    status, rule = error.fields.get("status"), error.fields.get("rule")
    known = {
        "status": status if isinstance(status, int) and 100 <= status <= 599 else "another than 200",
        "rule": rule if isinstance(rule, str) and RULE.fullmatch(rule) else "unknown",
    }
    return EngineError(provider.name, code, WORDS[code].format(**known))
