"""Pages that a worker fetched and read: checked on arrival, and kept for a while."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from websearch.jobs import Answer, JobFailed
from websearch.text import is_visible, one_line, plain_text

MAX_URL = 2000  # characters
MIB = 1024 * 1024
CACHE_BYTES = 64 * MIB
CACHE_PAGES = 256
FACTS_BYTES = 4096  # about what Python takes for a page without text

Kind = Literal["page", "text", "json", "table", "pdf", "feed", "image", "binary"]


def _line(limit: int) -> AfterValidator:
    return AfterValidator(lambda text: one_line(text, limit) or None if text else None)


def _address(url: str) -> str:
    """Return an address to show: one that is too long is cut off."""
    if not is_visible(url[:MAX_URL]) or urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("not an address")
    return url[:MAX_URL]


Address = Annotated[str, AfterValidator(_address)]
Title = Annotated[str | None, _line(300)]
Word = Annotated[str | None, _line(60)]


class Redirect(BaseModel):
    """One redirect on the way to a page."""

    status: int = Field(ge=300, le=399)
    url: Address


class PageFacts(BaseModel):
    """What a worker says about a page. It is hostile: text may say anything, but has the form that is asked for."""

    model_config = ConfigDict(frozen=True)

    final_url: Address
    status: int = Field(ge=100, le=599)
    redirects: tuple[Redirect, ...] = Field((), max_length=32)
    kind: Kind
    content_type: str = Field(pattern=r"^[a-z0-9.+-]{1,100}/[a-z0-9.+-]{1,100}$")
    charset: Word = None
    title: Title = None
    author: Title = None
    published: Word = None
    bytes: int = Field(ge=0, lt=2**63)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    text_bytes: int | None = Field(ge=0)
    warnings: tuple[Title, ...] = Field((), max_length=100)


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its text, if it has any, and its bytes, if they were asked for or are all there is."""

    facts: PageFacts
    text: str | None
    data: bytes

    @property
    def size(self) -> int:
        """Bytes of memory that it takes, about."""
        addresses = [self.facts.final_url, *(redirect.url for redirect in self.facts.redirects)]
        return FACTS_BYTES + sum(map(len, addresses)) + 4 * len(self.text or "") + len(self.data)


def parse_page(answer: Answer) -> Page:
    """Return the page in a worker's answer. Raises JobFailed if it is nonsense."""
    try:
        facts = PageFacts.model_validate(answer.header)
        split = facts.text_bytes or 0
        if split > len(answer.body):
            raise JobFailed("worker", "the worker's answer is cut off")
        text = None if facts.text_bytes is None else plain_text(answer.body[:split].decode())
    except (ValidationError, UnicodeDecodeError) as error:
        raise JobFailed("worker", "the worker's answer is nonsense") from error
    return Page(facts, text, answer.body[split:])


class PageCache:
    """The pages of the last minutes, up to a size and a number."""

    def __init__(self, ttl_s: float, size: int = CACHE_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._size = size
        self._clock = clock
        self._kept: OrderedDict[Hashable, tuple[float, Page]] = OrderedDict()  # the oldest first
        self.bytes = 0  # that all of them take

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, *, with_data: bool) -> Page | None:
        """Return a page that is fresh, and has its bytes if they are needed."""
        end, page = self._kept.get(key, (0.0, None))
        if page is None or end <= self._clock() or (with_data and page.facts.bytes != len(page.data)):
            return None
        return page

    def put(self, key: Hashable, page: Page) -> None:
        """Keep a page instead of those that have expired, and of the oldest ones if there is no room."""
        if self._ttl_s <= 0:
            return
        if key in self._kept:
            self._drop(key)
        now = self._clock()
        self._kept[key] = (now + self._ttl_s, page)
        self.bytes += page.size
        while self._kept and (self._is_full() or self._oldest_end() <= now):
            self._drop(next(iter(self._kept)))

    def _is_full(self) -> bool:
        return self.bytes > self._size or len(self._kept) > CACHE_PAGES

    def _oldest_end(self) -> float:
        return next(iter(self._kept.values()))[0]

    def _drop(self, key: Hashable) -> None:
        _, page = self._kept.pop(key)
        self.bytes -= page.size
