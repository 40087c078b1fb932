"""Pages that were fetched from the web."""

from pydantic import Field

from mcp_sandbox.views.base import View
from mcp_sandbox.views.files import ArtifactView, WrittenFile

PAGE_META = "mcp-sandbox/page"  # where the `_meta` of an MCP result carries a PageView


class RedirectView(View):
    """One redirect on the way to a page."""

    status: int
    url: str


class PageView(View):
    """A page, or a part of it. Title, author, text, addresses and warnings are untrusted text from the web."""

    url: str
    final_url: str
    status: int
    redirects: list[RedirectView]
    kind: str = Field(description="page, text, json, table, pdf, feed, image or binary")
    content_type: str
    charset: str | None
    title: str | None
    author: str | None
    published: str | None
    bytes: int = Field(description="Size of the whole download.")
    sha256: str = Field(description="Of the whole download.")
    total_chars: int | None = Field(description="Length of the whole text; null if there is none.")
    start_index: int
    next_start_index: int | None = Field(description="Give this as start_index to read on; null at the end.")
    text: str | None
    cached: bool = Field(description="The page was downloaded a short time ago.")
    saved: WrittenFile | None = Field(None, description="Where the whole download is in the sandbox.")
    artifact: ArtifactView | None = Field(None, description="What does not fit into the answer, kept for a while.")
    warnings: list[str]
