"""The web for callers: what the web tools of every face call."""

from mcp_sandbox.config import WebSettings
from mcp_sandbox.errors import SandboxError, WebUnavailable
from mcp_sandbox.views import PageView, SearchView
from mcp_sandbox.web.artifacts import Artifact
from mcp_sandbox.web.fetching import Fetching, FetchRequest
from mcp_sandbox.web.searching import Searching
from websearch.access import Caller
from websearch.jobs import JobFailed, Jobs
from websearch.providers import Provider
from websearch.search import SearchRequest

WEB = "web"  # stands for the sandbox in the log of connections


class Web:
    """Reaches the web with jobs in a machine, never from this process."""

    def __init__(self, jobs: Jobs, settings: WebSettings, providers: list[Provider]) -> None:
        self._searching = Searching(jobs, settings, providers)
        self._fetching = Fetching(jobs, settings)

    async def fetch(self, owner: str, request: FetchRequest) -> tuple[PageView, bytes]:
        """Fetch a part of a page; also return the whole download if it is wanted or has no text.

        Raises:
            BadRequest, FetchError, WebUnavailable, SandboxError: there is no page.
        """
        try:
            return await self._fetching.fetch(request, Caller(owner, WEB))
        except JobFailed as error:
            raise unavailable(error) from error

    def artifact(self, owner: str, artifact_id: str) -> Artifact:
        """Return what `fetch` kept for an owner. Raises ArtifactNotFound."""
        return self._fetching.artifacts.get(owner, artifact_id)

    async def search(self, owner: str, request: SearchRequest) -> SearchView:
        """Search the web.

        Raises:
            BadRequest, SearchNotSetUp, SearchFailed, WebUnavailable, SandboxError: there are no results.
        """
        try:
            return await self._searching.search(request, Caller(owner, WEB))
        except JobFailed as error:
            raise unavailable(error) from error

    async def probe_search(self, owner: str) -> dict[str, str | None]:
        """Ask every search provider; returns what is wrong with each, or None.

        Raises:
            WebUnavailable, SandboxError: there is no machine that could ask them.
        """
        try:
            return await self._searching.probe(Caller(owner, WEB))
        except JobFailed as error:
            raise unavailable(error) from error


def unavailable(error: JobFailed) -> SandboxError:
    """Return why no machine reaches the web: the error with which it could not start, if that is one of ours."""
    cause = error.__cause__
    return cause if isinstance(cause, SandboxError) else WebUnavailable(str(error))
