"""Fetches pages for callers: arguments are checked, pages become views, errors get their codes."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from mcp_sandbox import errors
from mcp_sandbox.config import WebSettings
from mcp_sandbox.errors import BadRequest, SandboxError
from mcp_sandbox.views import PageView, RedirectView
from mcp_sandbox.web.artifacts import Artifact, WebArtifacts
from websearch.access import Caller
from websearch.authority import BadAuthority, parse_authority
from websearch.jobs import JobFailed, Jobs
from websearch.pages import MAX_URL, Page, PageCache, parse_page

Format = Literal["markdown", "text", "html", "raw"]
MAX_CHARS = 200_000  # of one answer
GRACE_S = 10.0  # for the answer of a worker that used its time up
RULE = re.compile(r"[a-z0-9:.*_-]{1,100}")
PLAIN = "!#$%&'()*+,/:;=?@[]~"  # what stands in addresses as it is, next to letters and digits
UNSAFE = re.compile(r"[^A-Za-z0-9.]+")
MAX_SUFFIX = 10
SUFFIXES: dict[Format, str] = {"markdown": ".md", "text": ".txt", "html": ".html.txt", "raw": ".raw.txt"}
MAX_NAME = 40  # characters of a downloaded file's name: too few for sentences that a model might obey
# Why a certificate is not accepted, by OpenSSL's numbers. A worker's own words could be a stranger's.
CERTIFICATES = {
    10: "its certificate has expired",
    18: "its certificate is self-signed",
    19: "its certificate is from an authority that is not trusted",
    20: "its certificate is from an authority that is not trusted",
    21: "its certificate is from an authority that is not trusted",
    62: "its certificate is for another host",
}


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What to fetch, and which part of it to return."""

    url: str
    max_chars: int = 20_000
    start_index: int = 0
    format: Format = "markdown"
    keep: bool = False  # the whole download is wanted, too


class Fetching:
    """Fetches pages, and keeps them for callers who read on."""

    def __init__(self, jobs: Jobs, settings: WebSettings) -> None:
        self._jobs = jobs
        self._settings = settings
        self._cache = PageCache(settings.cache_s)
        self._certificates = settings.certificates()
        self.artifacts = WebArtifacts(settings.artifact_s, settings.artifact_bytes)

    async def fetch(self, request: FetchRequest, caller: Caller) -> tuple[PageView, bytes]:
        """Return a part of a page, and the whole download if it is wanted or has no text.

        What is longer than the part, and is not wanted as a download, becomes an artifact.

        Raises:
            BadRequest, FetchError: there is no page.
            JobFailed: there is no machine that reaches the web.
        """
        url = checked_url(request.url)
        key = (caller.owner, url, request.format)
        page = self._cache.get(key, with_data=request.keep)
        cached = page is not None
        if page is None:
            page = await self._download(replace(request, url=url), caller)
            self._cache.put(key, page)
        view = _view(request, url, page, cached=cached)
        artifact = None if request.keep else _artifact(view, page, request.format)
        if artifact is not None and self.artifacts.put(caller.owner, artifact):
            view = view.model_copy(update={"artifact": artifact.view})
        return view, page.data

    async def _download(self, request: FetchRequest, caller: Caller) -> Page:
        settings = self._settings
        fields = {
            "url": request.url,
            "format": request.format,
            "keep": request.keep,
            "max_bytes": settings.max_bytes,
            "time_s": settings.timeout_s,
            "robots": settings.respect_robots,
            "certificates": self._certificates,
        }
        try:
            timeout_s = settings.timeout_s + GRACE_S
            return parse_page(await self._jobs.run("fetch", fields, caller=caller, timeout_s=timeout_s))
        except JobFailed as error:
            if error.code == "unavailable":
                raise
            raise fetch_error(request.url, error, settings) from error


def checked_url(url: str) -> str:
    """Return an address that can be fetched, without its fragment. Raises BadRequest."""
    try:
        parts = urlsplit(url.strip())
        if parts.scheme not in ("http", "https") or not parts.netloc or len(url) > MAX_URL:
            raise BadRequest("url must be an http:// or https:// address of at most 2000 characters.")
        if "@" in parts.netloc:
            raise BadRequest("url must not contain a user name or password.")
        parse_authority(parts.netloc, 443)
    except (BadAuthority, ValueError) as error:
        raise BadRequest(f"url is not a valid address: {error}.") from error
    path, query = quote(parts.path or "/", safe=PLAIN), quote(parts.query, safe=PLAIN)  # such as spaces, letters like é
    return urlunsplit(parts._replace(fragment="", path=path, query=query))


def fetch_error(url: str, error: JobFailed, settings: WebSettings) -> SandboxError:
    """Return why a page was not fetched, in our own words."""
    make = FAILURES.get(error.code)
    return (
        errors.FetchFailed(url, "the process for it failed, or none was free")
        if make is None
        else make(url, error, settings)
    )


def _tls(url: str, error: JobFailed, _settings: WebSettings) -> SandboxError:
    number = error.fields.get("verify_code")
    return errors.FetchTls(url, CERTIFICATES.get(number if isinstance(number, int) else 0, "TLS failed"))


def _status(url: str, error: JobFailed, _settings: WebSettings) -> SandboxError:
    status = error.fields.get("status")
    return errors.FetchHttpStatus(url, status if isinstance(status, int) else 0)


def _refused(url: str, error: JobFailed, _settings: WebSettings) -> SandboxError:
    rule = str(error.fields.get("rule"))
    return errors.FetchRefused(url, rule if RULE.fullmatch(rule) else "unknown")


FAILURES: dict[str, Callable[[str, JobFailed, WebSettings], SandboxError]] = {
    "dns": lambda url, *_: errors.FetchDns(url, urlsplit(url).hostname or ""),
    "tls": _tls,
    "refused": _refused,
    "http_status": _status,
    "too_large": lambda url, _, settings: errors.FetchTooLarge(url, settings.max_bytes),
    "timeout": lambda url, _, settings: errors.FetchTimeout(url, settings.timeout_s),
    "in_the_way": lambda url, *_: errors.FetchFailed(url, "it took so long that other requests had to wait"),
    "robots": lambda url, *_: errors.FetchRobots(url),
    "unreachable": lambda url, *_: errors.FetchFailed(url, "the server cannot be reached"),
    "bad_response": lambda url, *_: errors.FetchFailed(url, "the server's answer is not proper HTTP, or it broke off"),
    "bad_url": lambda url, *_: errors.FetchFailed(url, "it leads to an address that cannot be fetched"),
    "unreadable": lambda url, *_: errors.FetchFailed(url, "its content cannot be read; format=raw may show it"),
}


def _view(request: FetchRequest, url: str, page: Page, *, cached: bool) -> PageView:
    facts, text = page.facts, page.text
    start, end = request.start_index, request.start_index + request.max_chars
    return PageView(
        url=url,
        final_url=facts.final_url,
        status=facts.status,
        redirects=[RedirectView(status=each.status, url=each.url) for each in facts.redirects],
        kind=facts.kind,
        content_type=facts.content_type,
        charset=facts.charset,
        title=facts.title,
        author=facts.author,
        published=facts.published,
        bytes=facts.bytes,
        sha256=facts.sha256,
        total_chars=None if text is None else len(text),
        start_index=start,
        next_start_index=end if text is not None and end < len(text) else None,
        text=None if text is None else text[start:end],
        cached=cached,
        warnings=[warning for warning in facts.warnings if warning],
    )


def _artifact(view: PageView, page: Page, format_: Format) -> Artifact | None:
    """Return what does not fit into an answer: a download without text, or the whole of a text that is longer."""
    if page.text is None:
        return Artifact(view.url, file_name(view), page.data, is_text=False)
    if view.text == page.text:
        return None
    name = file_name(view, SUFFIXES[format_])
    return Artifact(view.url, name, page.text.encode(), is_text=True)


def file_name(view: PageView, suffix: str | None = None) -> str:
    """Return a name for a download: that of its address, with a few digits that tell pages of one name apart."""
    path = PurePosixPath(unquote(urlsplit(view.final_url).path))
    suffix = UNSAFE.sub("", path.suffix)[:MAX_SUFFIX] if suffix is None else suffix
    stem = UNSAFE.sub("-", path.stem)[: MAX_NAME - len(suffix)].strip("-.")
    return f"{view.sha256[:8]}-{stem or 'page'}{suffix}"
