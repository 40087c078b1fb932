"""The text of a web search's results for a model."""

from collections.abc import Iterable

from mcp_sandbox.tools.content import call
from mcp_sandbox.tools.untrusted import untrusted
from mcp_sandbox.views import SearchErrorView, SearchResultView, SearchView

ENGINE_FAILED = "engine_failed"  # the code of errors whose words are a provider's


def search_text(view: SearchView) -> str:
    """Return the results as text from the web, and what to know about them."""
    found = "\n\n".join(map(_result, view.results)) or "Nothing was found."
    engines = [error for error in view.errors if error.code == ENGINE_FAILED]
    if engines:
        found += "\n\nEngines that did not answer: " + "; ".join(f"{e.engine}: {e.message}" for e in engines)
    return "\n".join([untrusted(found, f"web search with {' and '.join(view.providers)}"), *_remarks(view)])


def _result(result: SearchResultView) -> str:
    origin = " · ".join(filter(None, (result.published, result.engine)))
    return "\n".join(filter(None, (f"{result.rank}. {result.title}", result.url, origin, result.snippet)))


def _remarks(view: SearchView) -> Iterable[str]:
    failed = [error for error in view.errors if error.code != ENGINE_FAILED]
    if failed:
        yield f"Providers that failed: {_failures(failed)}. These results are from {' and '.join(view.providers)}."
    if view.partial:
        yield "The results are partial: not every engine answered."
    if view.results:
        more = call("web_search", query=view.query, page=view.page + 1)
        yield f"Read a page with fetch_url(url=…). More results: {more} and the same filters."


def _failures(errors: Iterable[SearchErrorView]) -> str:
    return "; ".join(f"{error.engine}: {error.message}" for error in errors)
