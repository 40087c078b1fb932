"""Listings in pages: no answer grows with what code leaves in a sandbox."""

from collections.abc import Iterable
from typing import TypeVar

from mcp_sandbox.views.base import View

T = TypeVar("T", bound=View)


def first_page(entries: Iterable[T], page_bytes: int) -> list[T]:
    """Return the first entries that fit into a page, and at least one: a reader must get on.

    They are measured as the MCP SDK writes them into the text of an answer: indented, in a list in an object.
    """
    page: list[T] = []
    for entry in entries:
        text = entry.model_dump_json(indent=2)
        page_bytes -= len(text.encode()) + 4 * text.count("\n") + len("    ,\n")
        if page and page_bytes < 0:
            break
        page.append(entry)
    return page
