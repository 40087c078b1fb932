"""Fetches one address: the job "fetch".

This process has the network and parses only HTTP and TLS. What is in the page is read by another process, without one.
"""

import time
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urljoin, urlsplit, urlunsplit
from urllib.robotparser import RobotFileParser

import httpx

from guest.web.client import check_refusal, web_errors
from guest.web.errors import WebError
from guest.web.extract import Download, extract
from guest.web.offline import Reading, Result

MAX_REDIRECTS = 10
MAX_SHOWN = 2000  # characters of an address
PLAIN = "!#$%&'()*+,/:;=?@[]~"  # what stands in addresses as it is; servers send spaces and bytes beyond ASCII, too
ROBOT = "mcp-sandbox"  # our name in robots.txt
ROBOTS_BYTES = 512 * 1024  # RFC 9309 demands at least 500 KiB
ACCEPT = "text/html,application/xhtml+xml,application/pdf;q=0.9,application/json;q=0.9,*/*;q=0.8"
EXTRACT_S = 5.0  # at least, however long the download took
MIN_STEP_S = 0.1


def run(fields: dict[str, Any], client: httpx.Client, reader: Reading) -> Result:
    """Download an address and return what is in it."""
    deadline = time.monotonic() + float(fields["time_s"])
    trip = Trip(client, deadline, int(fields["max_bytes"]), robots=bool(fields.get("robots")))
    download = trip.download(str(fields["url"]))
    order = {
        **{name: fields[name] for name in ("kind", "format", "max_bytes")},
        "keep": bool(fields.get("keep")),
        "url": download.url,
        "content_type": download.content_type,
        "encoding": download.encoding,
        "warnings": download.warnings,
    }
    header, body = reader.read(order, download.data, timeout_s=max(EXTRACT_S, deadline - time.monotonic()))
    return {"final_url": download.url[:MAX_SHOWN], "status": trip.status, "redirects": trip.redirects, **header}, body


def read(order: dict[str, Any], data: bytes) -> Result:
    """Return what is in a download. Runs without a network."""
    download = Download(data, order["url"], order["content_type"], order["encoding"], order["warnings"])
    return extract(download, order["format"], order["max_bytes"], keep=order["keep"])


class Trip:
    """The way to a page, over its redirects."""

    def __init__(self, client: httpx.Client, deadline: float, max_bytes: int, *, robots: bool) -> None:
        self._client = client
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._robots = robots
        self._rules: dict[str, RobotFileParser] = {}
        self.redirects: list[dict[str, Any]] = []
        self.status = 0

    def download(self, url: str) -> Download:
        """Follow redirects and return what is at their end. Raises WebError."""
        while True:
            _check_address(url)
            if self._robots:
                self._ask_robots(url)
            with web_errors(url), self._get(url, Accept=ACCEPT) as response:
                check_refusal(response)
                self.status = response.status_code
                if not (response.is_redirect and response.headers.get("location")):
                    return self._read(url, response)
                url = self._redirected(url, response)

    def _get(self, url: str, **headers: str) -> AbstractContextManager[httpx.Response]:
        """Begin a request, none of whose steps may take longer than there is time."""
        left = max(self._deadline - time.monotonic(), MIN_STEP_S)
        return self._client.stream("GET", url, headers=headers, timeout=left)

    def _redirected(self, url: str, response: httpx.Response) -> str:
        target = _encoded(url, response.headers["location"])
        self.redirects.append({"status": response.status_code, "url": target[:MAX_SHOWN]})
        if len(self.redirects) > MAX_REDIRECTS:
            raise WebError("bad_response", f"more than {MAX_REDIRECTS} redirects", url=url)
        return target

    def _read(self, url: str, response: httpx.Response) -> Download:
        status = response.status_code
        if status >= HTTPStatus.BAD_REQUEST:
            raise WebError(
                "http_status", f"the server answered {status} {_phrase(status)}".strip(), status=status, url=url
            )
        download = Download(
            b"", url, response.headers.get("content-type", ""), response.headers.get("content-encoding", "")
        )
        data = self._receive(response, download.warnings)
        return Download(data, url, download.content_type, download.encoding, download.warnings)

    def _receive(self, response: httpx.Response, warnings: list[str]) -> bytes:
        announced = response.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise _too_large(self._max_bytes)
        data = bytearray()
        try:
            for piece in response.iter_raw():
                data += piece
                if len(data) > self._max_bytes:
                    raise _too_large(self._max_bytes)
                if time.monotonic() > self._deadline:
                    raise WebError("timeout", f"the download took too long; {len(data)} bytes had arrived")
        except httpx.RemoteProtocolError:
            if not data:
                raise
            warnings.append(f"the server broke off after {len(data):,} bytes: this is not all")
        return bytes(data)

    # ---------------------------------------------------------------- robots.txt

    def _ask_robots(self, url: str) -> None:
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        if origin not in self._rules:
            self._rules[origin] = self._read_robots(f"{origin}/robots.txt")
        if not self._rules[origin].can_fetch(ROBOT, url):
            raise WebError("robots", "robots.txt of the site does not allow it", url=url)

    def _read_robots(self, url: str) -> RobotFileParser:
        rules = RobotFileParser()
        lines: list[str] = []
        with web_errors(url), self._get(url, **{"Accept-Encoding": "identity"}) as response:
            check_refusal(response)
            if response.status_code == HTTPStatus.OK:
                data = bytearray()
                for piece in response.iter_raw():
                    data += piece
                    if len(data) > ROBOTS_BYTES or time.monotonic() > self._deadline:
                        break
                lines = data[:ROBOTS_BYTES].decode("utf-8", "replace").splitlines()
        rules.parse(lines)
        return rules


def _encoded(base: str, location: str) -> str:
    """Return where a redirect leads, as an address without spaces and letters beyond ASCII."""
    try:
        parts = urlsplit(urljoin(base, location.strip()))
    except ValueError as error:
        raise WebError("bad_url", "a redirect leads to what is no address") from error
    path, query, fragment = (quote(part, safe=PLAIN) for part in (parts.path, parts.query, parts.fragment))
    return urlunsplit(parts._replace(path=path, query=query, fragment=fragment))


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname
    except ValueError:
        usable = None
    if not usable:
        raise WebError("bad_url", f"only http:// and https:// addresses can be fetched, not {url[:200]!r}")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _too_large(limit: int) -> WebError:
    return WebError("too_large", f"it has more than {limit:,} bytes", limit=limit)
