"""An HTTP client that reaches the web through the host's bridge, and says in one vocabulary why it could not."""

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx

from guest.jobs import TOKEN_USER
from guest.web.errors import WebError
from guest.web.keyed import SCHEME, KeyedTransport

CONNECT_S = 20.0
READ_S = 30.0  # without a byte
MAX_CONNECTIONS = 3  # a machine has room for 64 streams, and many jobs
USER_AGENT = "Mozilla/5.0 (compatible; mcp-sandbox)"
ACCEPT_ENCODING = "gzip, deflate, br"
REFUSAL = re.compile(r"refused by mcp-sandbox: ([a-z0-9:.*_-]{1,100})")
# Rules of the bridge that mean a failed connection, not a decision.
FAILURES = {
    "dns": ("dns", "the name cannot be resolved"),
    "unreachable": ("unreachable", "the server cannot be reached"),
    "bad-server": ("bad_response", "the server does not speak proper HTTP or TLS"),
}


class Proxy(NamedTuple):
    """Where the tunnel listens."""

    host: str = "127.0.0.1"
    port: int = 3128


def open_client(token: str, *, proxy: Proxy, tls: ssl.SSLContext) -> httpx.Client:
    """Return a client whose connections belong to `token`. It follows no redirects."""
    address = f"http://{TOKEN_USER}:{token}@{proxy.host}:{proxy.port}"
    return httpx.Client(
        proxy=address,
        mounts={f"{SCHEME}://": KeyedTransport(address)},
        verify=tls,
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=1),
        headers={"User-Agent": USER_AGENT, "Accept-Encoding": ACCEPT_ENCODING},
    )


def check_refusal(response: httpx.Response) -> None:
    """Raise WebError if a response is the bridge's own. A server that imitates it only harms itself."""
    reason = response.extensions.get("reason_phrase", b"").decode("latin-1")
    if REFUSAL.search(reason):
        raise refusal(reason)


def refusal(text: str) -> WebError:
    """Return the error for the first line of a refused request."""
    found = REFUSAL.search(text)
    if found is None:
        return WebError("unreachable", f"the proxy did not open a connection: {text[:200]}")
    rule = found[1]
    if rule in FAILURES:
        return WebError(*FAILURES[rule])
    return WebError("refused", f"the policy of this server refuses it (rule {rule})", rule=rule)


@contextmanager
def web_errors(url: str) -> Iterator[None]:
    """Translate the errors of a request."""
    try:
        yield
    except httpx.ProxyError as error:
        raise refusal(str(error)) from error
    except httpx.TimeoutException as error:
        raise WebError("timeout", "the server does not answer in time", url=url) from error
    except httpx.ConnectError as error:
        if (cause := _tls_error(error)) is not None:
            code = getattr(cause, "verify_code", None)
            raise WebError("tls", f"no secure connection: {error}", url=url, verify_code=code) from error
        raise WebError("unreachable", f"the server cannot be reached: {error}", url=url) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise WebError("bad_url", f"not an address that can be fetched: {error}", url=url) from error
    except httpx.HTTPError as error:
        raise WebError("bad_response", f"the server broke off or does not speak HTTP: {error}", url=url) from error


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the TLS error behind an error of a connection, if there is one."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, ssl.SSLError):
        seen = seen.__cause__ or seen.__context__
    return seen
