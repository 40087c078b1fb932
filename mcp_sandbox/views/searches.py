"""What a web search found."""

from pydantic import Field

from mcp_sandbox.views.base import View

SEARCH_META = "mcp-sandbox/search"  # where the `_meta` of an MCP result carries a SearchView


class SearchResultView(View):
    """One result. All of it is untrusted text from the web."""

    rank: int
    title: str
    url: str
    snippet: str
    published: str | None = Field(description="YYYY-MM-DD, or as the provider wrote it.")
    engine: str = Field(description="Provider, or provider/engine; several if more than one found it.")


class SearchErrorView(View):
    """A provider, or an engine behind it, that did not answer."""

    engine: str
    code: str
    message: str = Field(description="For code engine_failed: untrusted text of the provider.")


class SearchView(View):
    """The results of a web search."""

    query: str
    page: int
    results: list[SearchResultView]
    providers: list[str] = Field(description="The providers that answered.")
    partial: bool = Field(description="Results are missing because an engine did not answer.")
    errors: list[SearchErrorView]
    cached: bool = Field(description="The same search was answered a short time ago.")
