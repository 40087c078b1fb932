"""Pages from a worker on the host: what is kept of them, and for how long."""

import hashlib
from typing import Any

import pytest

from websearch.jobs import Answer, JobFailed
from websearch.pages import CACHE_PAGES, FACTS_BYTES, Page, PageCache, parse_page


def answer(text: str = "hello", **facts: Any) -> Answer:
    """Return what a worker says about a page."""
    packed = text.encode()
    header = {
        "final_url": "http://site.example/",
        "status": 200,
        "kind": "text",
        "content_type": "text/plain",
        "bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
        "text_bytes": len(packed),
        **facts,
    }
    return Answer(header, packed)


def page(text: str = "hello", **facts: Any) -> Page:
    return parse_page(answer(text, **facts))


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_text_of_a_hostile_machine_cannot_steer_a_terminal_or_hide_words():
    shown = "line\n\ttab é 日本語 हिन्दी 🙂"
    assert page(shown).text == shown
    assert page("a\x1b[2J\r\x9b\u200b\u202e\u2028\U000e0041b").text == "a[2Jb"


def test_a_size_that_no_page_has_is_nonsense():
    with pytest.raises(JobFailed, match="nonsense"):
        page(bytes=10**4000)


def test_expired_pages_make_room_for_new_ones():
    clock = Clock()
    cache = PageCache(10, clock=clock)
    cache.put("old", page())
    clock.now = 5
    cache.put("fresh", page())
    clock.now = 11
    cache.put("new", page())
    assert len(cache) == 2
    assert cache.get("fresh", with_data=False) is not None


def test_a_cache_without_time_keeps_nothing():
    cache = PageCache(0)
    cache.put("page", page())
    assert len(cache) == 0


def test_many_small_pages_do_not_fill_the_memory():
    cache = PageCache(10, clock=Clock())
    for number in range(CACHE_PAGES + 10):
        cache.put(number, page(""))
    assert len(cache) == CACHE_PAGES
    assert cache.bytes >= CACHE_PAGES * FACTS_BYTES


def test_the_oldest_pages_leave_when_the_size_is_reached():
    redirects = [{"status": 302, "url": "http://site.example/" + "x" * 1900}] * 10
    large = page("x" * 1000, redirects=redirects)
    cache = PageCache(10, size=2 * large.size, clock=Clock())
    for key in ("first", "second", "second", "third"):
        cache.put(key, large)
    assert large.size > FACTS_BYTES + 4 * 1000 + 10 * 1900
    assert cache.bytes == 2 * large.size
    assert cache.get("first", with_data=False) is None
    assert cache.get("second", with_data=False) is large
