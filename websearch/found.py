"""What search providers found: checked, cleaned and merged. Everything that comes from a machine is hostile."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import AfterValidator, BaseModel, StringConstraints, ValidationError

from websearch.text import is_visible, one_line

MAX_URL = 2000  # characters, as all limits here
MAX_TITLE = 200
MAX_SNIPPET = 600
MAX_PUBLISHED = 40
MAX_ENGINE = 40
MAX_ERROR = 200
MAX_ITEMS = 50  # results of one provider, and errors of engines behind it
MAX_RAW = 20_000  # of one text as a machine sends it
FUSION_RANK = 60  # reciprocal rank fusion: the usual constant
# Parameters that say where a visitor came from, not what is shown.
TRACKING = ("utm_", "fbclid", "gclid", "msclkid", "mc_eid")


@dataclass(frozen=True, slots=True)
class Found:
    """One result. `engine` is the provider, or the engine behind it; several are separated by commas."""

    rank: int
    title: str
    url: str
    snippet: str
    published: str | None
    engine: str


class EngineError(Exception):
    """A provider, or an engine behind it, that did not answer. The name of an engine is a stranger's text."""

    def __init__(self, engine: str, code: str, message: str, provider: str | None = None) -> None:
        super().__init__(message)
        self.engine = engine
        self.provider = provider or engine
        self.code = code
        self.message = message


def _checked_url(text: str) -> str:
    """Return a web address that shows where it leads, or raise ValueError."""
    if len(text) > MAX_URL or not is_visible(text) or any(char in text for char in '<>"`\\'):
        raise ValueError("not a plain address")
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.port == 0:
        raise ValueError("not a web address")  # a port that is no number, or too large, raises it in `parts.port`
    return text


Raw = Annotated[str, StringConstraints(max_length=MAX_RAW)]


class _RawResult(BaseModel):
    """A result as a machine sends it."""

    url: Annotated[str, AfterValidator(_checked_url)]
    title: Raw = ""
    snippet: Raw = ""
    published: Raw = ""
    engine: Raw = ""


class _RawError(BaseModel):
    engine: Raw
    error: Raw


T = TypeVar("T", bound=BaseModel)


def parse_results(raw: object, provider: str) -> list[Found]:
    """Return the results in a machine's answer. Those that are not as they should be are left out."""
    found = [
        Found(
            rank=rank,
            title=one_line(result.title, MAX_TITLE) or result.url,
            url=result.url,
            snippet=one_line(result.snippet, MAX_SNIPPET),
            published=_date(result.published),
            engine=_engine(provider, result.engine),
        )
        for rank, result in enumerate(_valid(_RawResult, raw), 1)
    ]
    return list({key_of(result.url): result for result in reversed(found)}.values())[::-1]


def parse_errors(raw: object, provider: str) -> list[EngineError]:
    """Return the errors of the engines behind a provider."""
    return [
        EngineError(one_line(error.engine, MAX_ENGINE), "engine_failed", one_line(error.error, MAX_ERROR), provider)
        for error in _valid(_RawError, raw)
    ]


def renumbered(found: Sequence[Found]) -> tuple[Found, ...]:
    """Return results with their ranks from 1 on."""
    return tuple(replace(result, rank=rank) for rank, result in enumerate(found, 1))


def merged(lists: Mapping[str, Sequence[Found]]) -> tuple[Found, ...]:
    """Merge the results of several providers, each address once: the better and the more often found, the earlier."""
    best: dict[str, Found] = {}
    scores: dict[str, float] = {}
    engines: dict[str, list[str]] = {}
    for results in lists.values():
        for rank, result in enumerate(results, 1):
            key = key_of(result.url)
            best.setdefault(key, result)
            scores[key] = scores.get(key, 0.0) + 1 / (FUSION_RANK + rank)
            engines.setdefault(key, []).append(result.engine)
    order = sorted(best, key=lambda key: -scores[key])  # equal ones stay in the order of the providers
    return renumbered([replace(best[key], engine=", ".join(dict.fromkeys(engines[key]))) for key in order])


def key_of(url: str) -> str:
    """Return the same text for addresses that lead to the same page."""
    parts = urlsplit(url)
    host = (parts.hostname or "").removeprefix("www.")
    query = [(name, value) for name, value in parse_qsl(parts.query, True) if not name.lower().startswith(TRACKING)]
    return f"{host}:{parts.port or ''}{parts.path.rstrip('/')}?{urlencode(query)}"


def within(url: str, site: str) -> bool:
    """Return whether an address belongs to a domain or to one below it."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    return host == site or host.endswith(f".{site}")


def _valid(kind: type[T], raw: object) -> list[T]:
    """Return the items of a list that are of a kind."""
    found: list[T] = []
    for item in raw[:MAX_ITEMS] if isinstance(raw, list) else ():
        with suppress(ValidationError):
            found.append(kind.model_validate(item, strict=True))
    return found


def _engine(provider: str, behind: str) -> str:
    name = one_line(behind, MAX_ENGINE)
    return f"{provider}/{name}" if name else provider


def _date(text: str) -> str | None:
    """Return a date as YYYY-MM-DD if it is in a format of ISO 8601, else as it is."""
    try:
        return datetime.fromisoformat(text.strip()).date().isoformat()
    except ValueError:
        return one_line(text, MAX_PUBLISHED) or None
