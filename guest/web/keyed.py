"""Requests to which the host's bridge adds an API key.

The bridge must see such a request to put the key in, so it cannot go through a tunnel. It goes to the bridge in plain
text and in absolute form, `GET https://…`, over the machine's own channel; the bridge speaks TLS with the provider.
"""

import base64
import ssl

import httpx

SCHEME = "keyed"  # a client sends keyed://host/path in this way, as https://host/path


class KeyedTransport(httpx.HTTPTransport):
    """Sends requests to a proxy in absolute form."""

    def __init__(self, proxy: str) -> None:
        # It never speaks TLS itself, and a context with certificates would take long to make.
        super().__init__(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), trust_env=False)
        url = httpx.URL(proxy)
        self._proxy = url.copy_with(username=None, password=None)
        credentials = base64.b64encode(f"{url.username}:{url.password}".encode())
        self._authorization = (b"Proxy-Authorization", b"Basic " + credentials)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        target = request.url.copy_with(scheme="https")
        return super().handle_request(
            httpx.Request(
                request.method,
                self._proxy,
                headers=[*request.headers.raw, self._authorization],
                stream=request.stream,
                extensions={**request.extensions, "target": str(target).encode("ascii")},
            )
        )
