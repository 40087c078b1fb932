"""Reads HTML: the main content of a page as Markdown or text, or the whole page as clean HTML."""

import logging
from copy import deepcopy
from itertools import islice
from typing import Any

import trafilatura
from lxml import etree
from lxml import html as lxml_html
from lxml_html_clean import Cleaner

from guest.web.cleaning import one_line, remove_hidden
from guest.web.found import Found

MIN_TEXT = 200  # characters; a page with less main content is shown whole
MIN_SHARE = 4  # the main content may be so many times smaller than all text, if it is short
MAX_ELEMENTS = 20_000  # to find the main content of 60,000 took a minute: the time grows with their square
logging.getLogger("trafilatura").setLevel(logging.CRITICAL)

CLEANER = Cleaner(
    scripts=True,
    javascript=True,
    comments=True,
    style=True,
    inline_style=True,
    links=True,
    meta=True,
    page_structure=False,
    processing_instructions=True,
    embedded=True,
    frames=True,
    forms=True,
    annoying_tags=True,
    remove_unknown_tags=False,
    safe_attrs_only=True,
    safe_attrs=frozenset({"href", "src", "alt", "title", "colspan", "rowspan", "lang", "dir", "datetime", "start"}),
)


def read_page(text: str, url: str, form: str) -> Found:
    """Return what a page says, in the form `markdown`, `text` or `html`."""
    found = Found("page")
    parser = lxml_html.HTMLParser(encoding="utf-8", remove_pis=True, remove_comments=True)
    tree = lxml_html.document_fromstring(text.encode("utf-8", "replace"), parser=parser, ensure_head_body=True)
    is_large = sum(1 for _ in islice(tree.iter(), MAX_ELEMENTS + 1)) > MAX_ELEMENTS
    if not is_large:
        _read_metadata(tree, url, found)
    if found.title is None:
        found.title = one_line(tree.findtext(".//title"))
    remove_hidden(tree)
    if form == "html":
        found.text = _clean_html(tree, url)
        return found
    if is_large:
        found.text = trafilatura.html2txt(tree) or ""
        found.warn("the page is too large to find its main content; this is all of its text")
        return found
    found.text = _main_content(tree, url, form)
    whole = trafilatura.html2txt(tree) or ""
    if len(found.text) < MIN_TEXT and len(found.text) * MIN_SHARE < len(whole):
        found.text = whole
        found.warn("the page has no recognisable main content; this is all of its text")
    return found


def _read_metadata(tree: Any, url: str, found: Found) -> None:  # noqa: ANN401 - lxml has no types
    try:
        about = trafilatura.extract_metadata(deepcopy(tree), default_url=url, extensive=False)
    except Exception:  # what pages say about themselves is often broken; the page is still there
        about = None
    if about is not None:
        found.title, found.author = one_line(about.title), one_line(about.author)
        found.published = one_line(about.date, 40)


def _main_content(tree: Any, url: str, form: str) -> str:  # noqa: ANN401
    markdown = form == "markdown"
    try:
        text = trafilatura.extract(
            deepcopy(tree),
            url=url,
            output_format="markdown" if markdown else "txt",
            include_links=markdown,
            include_formatting=markdown,
            include_comments=False,
            include_tables=True,
        )
    except Exception:  # some page always surprises a library; the caller falls back to all text
        text = None
    return text or ""


def _clean_html(tree: Any, url: str) -> str:  # noqa: ANN401
    tree.make_links_absolute(url, handle_failures="discard")
    body = CLEANER.clean_html(tree).find("body")
    return str(etree.tostring(body, encoding="unicode", method="html", pretty_print=True))
