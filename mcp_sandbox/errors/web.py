"""Errors of `web_search` and `fetch_url`."""

from dataclasses import dataclass

from mcp_sandbox.errors.base import SandboxError


@dataclass(eq=False)
class WebUnavailable(SandboxError):
    """The machine that reaches the web could not be started."""

    code = "web_unavailable"
    sentence = "The web cannot be reached: {reason}."
    reason: str


@dataclass(eq=False)
class FetchError(SandboxError):
    """An address could not be fetched. Only subclasses are raised."""

    code = "fetch_error"
    url: str


@dataclass(eq=False)
class FetchFailed(FetchError):
    """An address could not be fetched, for another reason than those below."""

    code = "fetch_failed"
    sentence = "The address {url} could not be fetched: {reason}."
    reason: str


@dataclass(eq=False)
class FetchDns(FetchError):
    """The name of the host cannot be resolved."""

    code = "fetch_dns"
    sentence = "The address {url} could not be fetched: the name {host} cannot be resolved."
    host: str


@dataclass(eq=False)
class FetchTls(FetchError):
    """There is no secure connection to the server."""

    code = "fetch_tls"
    sentence = "The address {url} could not be fetched: there is no secure connection, {reason}."
    reason: str


@dataclass(eq=False)
class FetchRefused(FetchError):
    """The network policy of this server refuses the address, or one that it redirects to."""

    code = "fetch_refused"
    sentence = "The address {url} was not fetched: it, or an address it redirects to, is refused by the rule {rule}."
    rule: str


@dataclass(eq=False)
class FetchTooLarge(FetchError):
    """The download is larger than a limit, possibly only when decompressed."""

    code = "fetch_too_large"
    sentence = "The address {url} was not fetched: it has more than {limit:,} bytes."
    limit: int


@dataclass(eq=False)
class FetchTimeout(FetchError):
    """The download took too long."""

    code = "fetch_timeout"
    sentence = "The address {url} was not fetched: it took longer than {limit_s:g} s."
    limit_s: float


@dataclass(eq=False)
class FetchHttpStatus(FetchError):
    """The server answered with an error."""

    code = "fetch_http_status"
    sentence = "The address {url} could not be fetched: the server answered with status {status}."
    status: int


@dataclass(eq=False)
class FetchRobots(FetchError):
    """The robots.txt of the site does not allow to fetch the address."""

    code = "fetch_robots"
    sentence = "The address {url} was not fetched: robots.txt of the site does not allow it."


@dataclass(eq=False)
class ArtifactNotFound(SandboxError):
    """What was fetched is not kept any more, or belongs to another owner; the answer is the same."""

    code = "artifact_not_found"
    sentence = "The artifact {artifact_id!r} does not exist, or it is not kept any more."
    artifact_id: str


@dataclass(eq=False)
class SearchNotSetUp(SandboxError):
    """No web search provider is set up."""

    code = "search_not_set_up"
    sentence = "No web search provider is set up."


@dataclass(eq=False)
class SearchFailed(SandboxError):
    """No web search provider answered; each error has an engine, a code and a message."""

    code = "search_failed"
    sentence = "No web search provider answered: {problems}."
    problems: str
    errors: list[dict[str, str]]
