"""Looks names up and connects to the addresses that were checked, directly or through the host's own proxy."""

import base64
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from itertools import chain, zip_longest
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import anyio
import anyio.to_thread
import h11
from anyio.abc import ByteStream

from websearch.authority import Authority, IPAddress, parse_authority

RESOLVE_S = 10.0
CONNECT_S = 15.0
STAGGER_S = 0.25  # RFC 8305: how long an attempt has before the next address is tried as well
MAX_ADDRESSES = 8  # tried for one connection
MAX_REPLY = 64 * 1024
# At the same time. A lookup that is given up goes on in its thread, but counts no more: a slow name server holds up
# nobody else. By default one owner has a quarter as many connections.
LOOKUPS = anyio.CapacityLimiter(128)

Resolver = Callable[[str], Awaitable[Sequence[IPAddress]]]


class DialFailed(Exception):
    """No connection; the message is for the guest and names no address of the host's network."""

    rule = "unreachable"


class NameUnknown(DialFailed):
    """The host's name has no address."""

    rule = "dns"


@dataclass(frozen=True, slots=True)
class Upstream:
    """A proxy of the host through which connections go."""

    authority: Authority
    credentials: str | None = None  # user:password

    def headers(self) -> list[tuple[str, str]]:
        """Return what the proxy needs to let us in."""
        if self.credentials is None:
            return []
        return [("Proxy-Authorization", "Basic " + base64.b64encode(self.credentials.encode()).decode("ascii"))]


def upstream_for(host: str, scheme: str) -> Upstream | None:
    """Return the proxy that the host's environment names for a host (HTTPS_PROXY, HTTP_PROXY, NO_PROXY), if any."""
    proxies = getproxies_environment()
    url = proxies.get(scheme) or proxies.get("all")
    if not url or proxy_bypass_environment(host, proxies):
        return None
    return parse_upstream(url)


def parse_upstream(url: str) -> Upstream:
    """Return the proxy that a variable names, with or without a scheme."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    return Upstream(parse_authority(parts.netloc.rpartition("@")[2], 80), user)


async def resolve(host: str) -> Sequence[IPAddress]:
    """Return the addresses of a host, as this host's resolver knows them. Raises DialFailed."""
    try:
        with anyio.fail_after(RESOLVE_S):
            found = await anyio.to_thread.run_sync(
                partial(socket.getaddrinfo, host.encode("ascii"), None, type=socket.SOCK_STREAM),
                abandon_on_cancel=True,
                limiter=LOOKUPS,
            )
    except (OSError, UnicodeError) as error:
        raise NameUnknown(f"the name {host} cannot be resolved") from error
    # An address with a zone, such as fe80::1%eth0, is link-local: without its zone it is refused as such.
    return list(dict.fromkeys(ip_address(str(where[0]).partition("%")[0]) for *_, where in found))


async def connect(addresses: Sequence[IPAddress], port: int) -> ByteStream:
    """Connect to the first address that answers (happy eyeballs, RFC 8305). Raises DialFailed."""
    winner: list[ByteStream] = []
    errors: list[OSError] = []

    async def attempt(address: IPAddress, failed: anyio.Event) -> None:
        try:
            stream = await anyio.connect_tcp(str(address), port)
        except OSError as error:
            errors.append(error)
            failed.set()
            return
        if winner:  # two answered in the same turn of the loop
            await stream.aclose()
            return
        winner.append(stream)
        tasks.cancel_scope.cancel()

    try:
        with anyio.move_on_after(CONNECT_S):
            async with anyio.create_task_group() as tasks:
                for address in in_turns(addresses)[:MAX_ADDRESSES]:
                    failed = anyio.Event()
                    tasks.start_soon(attempt, address, failed)
                    with anyio.move_on_after(STAGGER_S):
                        await failed.wait()
    except BaseException:  # the caller gave up in the same turn of the loop
        for stream in winner:
            await anyio.aclose_forcefully(stream)
        raise
    if not winner:
        raise DialFailed(f"no connection: {errors[-1].strerror}" if errors else "no connection in time")
    return winner[0]


async def connect_through(upstream: Upstream, target: Authority) -> ByteStream:
    """Open a tunnel to `target` through a proxy of the host. Raises DialFailed."""
    stream = await connect_to_proxy(upstream)
    try:
        with anyio.fail_after(CONNECT_S):
            await _ask_for_tunnel(stream, upstream, target)
    except BaseException as error:
        await anyio.aclose_forcefully(stream)
        if isinstance(error, (OSError, h11.RemoteProtocolError, anyio.EndOfStream, anyio.BrokenResourceError)):
            raise DialFailed("the host's proxy did not open a tunnel") from error
        raise
    return stream


async def connect_to_proxy(upstream: Upstream) -> ByteStream:
    """Connect to a proxy of the host, which may be at any address."""
    where = upstream.authority
    addresses = [where.address] if where.address is not None else await resolve(where.host)
    return await connect(addresses, where.port)


async def _ask_for_tunnel(stream: ByteStream, upstream: Upstream, target: Authority) -> None:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_REPLY)
    headers = [("Host", str(target)), *upstream.headers()]
    await stream.send(connection.send(h11.Request(method="CONNECT", target=str(target), headers=headers)) or b"")
    while (event := connection.next_event()) is h11.NEED_DATA:
        # A byte at a time would be exact; a proxy sends nothing after its answer until we do.
        connection.receive_data(await stream.receive())
    if not isinstance(event, h11.Response) or not 200 <= event.status_code < 300:
        status = getattr(event, "status_code", "no status")
        raise DialFailed(f"the host's proxy refuses the tunnel ({status})")


def in_turns(addresses: Sequence[IPAddress]) -> list[IPAddress]:
    """Return addresses with the two families taking turns, the first one's family first."""
    first = [a for a in addresses if a.version == addresses[0].version]
    other = [a for a in addresses if a.version != addresses[0].version]
    return [a for a in chain.from_iterable(zip_longest(first, other)) if a is not None]
