"""Does jobs before the first real one, because libraries load, compile and allocate much on first use.

The jobs take the whole way, with a proxy that answers for all servers. Each fork rehearses once more: memory that a
fork writes to for the first time has to be copied, which takes long in gVisor. The page is smaller then, because the
next job may wait for the fork; a tiny one would leave more of the copying to the job.
"""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from threading import Thread
from typing import Any

from guest.web.client import Proxy, open_client
from guest.web.errors import WebError
from guest.web.kinds import KINDS, read
from guest.web.offline import Reading, Result

HOST = "rehearsal.example"
TIME_S = 60.0  # emulated CPUs take long the first time
MAX_BYTES = 1 << 20
CHUNK = 1 << 16
LARGE, SMALL = 50, 12  # sections of a page; a large page has 100 KB
TEXT = "Some plain words of an article, which says little but has <b>bold</b> text and <a href='/'>links</a>. " * 6
JOBS = (("/large", "html"), ("/large", "text"), ("/large", "markdown"), ("/data.json", "text"), ("/data.csv", "text"))


class InProcess:
    """Reads in this process, which is only right for what the rehearsal itself has sent."""

    def read(self, fields: dict[str, Any], data: bytes, *, timeout_s: float) -> Result:  # noqa: ARG002 - as others do
        return read(fields, data)


class Nowhere:
    """Reads nothing: the process that reads rehearses by itself."""

    def read(self, fields: dict[str, Any], data: bytes, *, timeout_s: float) -> Result:  # noqa: ARG002
        return {}, b""


def rehearse(tls: ssl.SSLContext) -> None:
    """Fetch and read one download of each common kind, and begin a secure connection."""
    with _proxy() as proxy:
        for path, form in JOBS:
            _fetch(f"http://{HOST}{path}", form, proxy, tls, InProcess())
        with suppress(WebError):  # there is no server behind the proxy
            _fetch(f"https://{HOST}/", "text", proxy, tls, InProcess())


def rehearse_fetching(tls: ssl.SSLContext) -> None:
    """Fetch a small page, after a fork."""
    with _proxy() as proxy:
        _fetch(f"http://{HOST}/small", "markdown", proxy, tls, Nowhere())


def rehearse_reading() -> None:
    """Read a small page, after a fork."""
    order = {
        "kind": "fetch",
        "format": "markdown",
        "max_bytes": MAX_BYTES,
        "keep": False,
        "url": f"http://{HOST}/small",
    }
    read({**order, "content_type": "text/html", "encoding": "", "warnings": []}, CONTENTS["/small"][1])


def _fetch(url: str, form: str, proxy: Proxy, tls: ssl.SSLContext, reader: Reading) -> None:
    fields = {"kind": "fetch", "url": url, "format": form, "max_bytes": MAX_BYTES, "time_s": TIME_S}
    with open_client("rehearsal", proxy=proxy, tls=tls) as client:
        KINDS["fetch"].run(fields, client, reader)


def _page(sections: int) -> bytes:
    menu = "".join(f"<li><a href='/menu/{number}'>entry {number}</a></li>" for number in range(8 * sections))
    text = "".join(
        f"<h2>Section {number}</h2><p class='lead'>{TEXT}</p><p>{TEXT}</p><ul><li>one</li><li>{TEXT}</li></ul>"
        f"<table><tr><th>a</th><th>b</th></tr><tr><td>{number}</td><td>2</td></tr></table><pre>x = {number}</pre>"
        for number in range(sections)
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Rehearsal</title>"
        "<meta name='author' content='A. Writer'><meta property='article:published_time' content='2024-01-01'>"
        "<style>.gone { display: none } .lead { color: black }</style><script>var x = 1;</script></head>"
        f"<body><header><nav><ul>{menu}</ul></nav></header><main><article><h1>Rehearsal</h1>{text}</article>"
        "<aside class='gone'>hidden</aside></main><footer><p>By <a href='/'>A. Writer</a></p></footer></body></html>"
    ).encode()


CONTENTS = {
    "/large": ("text/html", _page(LARGE)),
    "/small": ("text/html", _page(SMALL)),
    "/data.json": ("application/json", b'{"a": [1, 2]}'),
    "/data.csv": ("text/csv", b"a,b\n1,2\n"),
}


# ---------------------------------------------------------------- a proxy that answers for all servers


@contextmanager
def _proxy() -> Iterator[Proxy]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=_serve, args=(listening,))
        thread.start()
        try:
            yield Proxy(*listening.getsockname())
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()


def _serve(listening: socket.socket) -> None:
    with suppress(OSError):
        while True:
            peer, _ = listening.accept()
            with peer, suppress(ConnectionError):
                _answer(peer)


def _answer(peer: socket.socket) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        if not (piece := peer.recv(CHUNK)):
            return
        head += piece
    method, target, *_ = head.decode().split()
    status = f"HTTP/1.1 {HTTPStatus.OK.value} {HTTPStatus.OK.phrase}\r\n"
    if method == "CONNECT":
        peer.sendall(f"{status}\r\n".encode())
        peer.recv(CHUNK)  # the first message of TLS, which gets no answer
        return
    kind, body = CONTENTS[target.removeprefix(f"http://{HOST}")]
    headers = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    peer.sendall(f"{status}{headers}\r\n".encode() + body)
