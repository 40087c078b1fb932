"""Sites on loopback: what a server says, byte by byte or page by page, with TLS or without."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import anyio
import trustme
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSStream

MAX_HEAD = 64 * 1024
GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead)

Site = Callable[[ByteStream], Awaitable[None]]


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[int]:
    """Serve a site on a free port of loopback; yields the port."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, site)
        yield listener.extra(SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def serving_tls(authority: trustme.CA, host: str, site: Site) -> AsyncIterator[int]:
    """Serve a site over TLS, with a certificate for `host`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)

    async def handshake(stream: ByteStream) -> None:
        async with stream:
            with suppress(*GONE, ssl.SSLError):
                await site(
                    await TLSStream.wrap(stream, server_side=True, ssl_context=context, standard_compatible=False)
                )

    async with serving(handshake) as port:
        yield port


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """Return a client's context that trusts the authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def head_of(stream: ByteStream) -> bytes:
    """Return the head of a request or a response."""
    return await BufferedByteReceiveStream(stream).receive_until(b"\r\n\r\n", MAX_HEAD)


def answering(response: bytes, seen: list[bytes] | None = None) -> Site:
    """Return a site that answers every connection with the same bytes, and notes the heads of requests in `seen`."""

    async def site(stream: ByteStream) -> None:
        async with stream:
            head = await head_of(stream)
            if seen is not None:
                seen.append(head)
            await stream.send(response)

    return site


@dataclass(frozen=True)
class Page:
    """What a site answers."""

    body: bytes = b""
    status: str = "200 OK"
    headers: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the response. Its length is stated unless the headers state another."""
        headers = {"Content-Length": str(len(self.body)), "Connection": "close", **self.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {self.status}\r\n{head}\r\n".encode() + self.body


NOT_FOUND = Page(b"there is no such page\n", "404 Not Found")
Lookup = Callable[[str], Page | None]


def pages(lookup: Mapping[str, Page] | Lookup, seen: list[str] | None = None) -> Site:
    """Return a site with these pages, by path with its query. `seen` gets the path of every request."""
    find: Lookup = lookup.get if isinstance(lookup, Mapping) else lookup

    async def site(stream: ByteStream) -> None:
        async with stream:
            with suppress(*GONE):
                path = (await head_of(stream)).split(b" ", 2)[1].decode()
                if seen is not None:
                    seen.append(path)
                await stream.send((find(path) or NOT_FOUND).encoded())

    return site


def folder(root: Path) -> Lookup:
    """Return the pages of a directory, for `pages`. A directory in it is shown as its index.html."""

    def find(target: str) -> Page | None:
        path = (root / unquote(urlsplit(target).path).lstrip("/")).resolve()
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file() or not path.is_relative_to(root.resolve()):
            return None
        html = {"Content-Type": "text/html"} if path.suffix == ".html" else {}
        return Page(path.read_bytes(), headers=html)

    return find
