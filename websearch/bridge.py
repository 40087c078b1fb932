"""A forward proxy for one guest connection after the other: CONNECT, and requests in absolute form.

The bridge listens nowhere. Guests reach it over streams of their agent channel. Every request is decided in one place,
`Bridge._admit`, and logged in one line.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import anyio
import h11
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from websearch import dial
from websearch.access import Access, Caller, LimitReached
from websearch.addresses import IPAddress
from websearch.authority import Authority, BadAuthority, parse_authority
from websearch.client_hello import ACCESS_DENIED, ClientHello, HelloReader, NotTls
from websearch.forwarding import forward, relay
from websearch.http_peer import HttpPeer, end_to_end
from websearch.policy import Policy, Request, Surroundings, Verdict, decide, decide_name, decide_tls, refused
from websearch.quotas import Ledger
from websearch.secrets import Secret, fill_in

HELLO_S = 15.0  # for a guest to say what it wants, and for the first bytes of a tunnel
IDLE_S = 60.0  # between two requests on one connection
HTTP_PORT, HTTPS_PORT = 80, 443
FORBIDDEN, TOO_MANY, BAD_REQUEST, BAD_GATEWAY = 403, 429, 400, 502
CLOSED = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)
ESTABLISHED = h11.Response(status_code=200, reason="Connection established", headers=[])


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.status = status
        self.verdict = verdict


class Bridge:
    """Decides about, carries and records the requests of guests."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        *,
        surroundings: Surroundings | None = None,
        secrets: Mapping[str, Sequence[Secret]] | None = None,
        resolver: dial.Resolver = dial.resolve,
        tls: ssl.SSLContext | None = None,
        on_access: Callable[[Access], None] = Access.write_log,
        advice: Mapping[str, str] | None = None,
    ) -> None:
        """`advice` says for some rules what a guest could do about a refusal."""
        self._policy = policy
        self._ledger = ledger
        self._surroundings = surroundings or Surroundings()
        self._secrets = secrets or {}
        self._resolve = resolver
        self._tls = tls
        self._on_access = on_access
        self._advice = advice or {}

    async def serve(self, stream: ByteStream, caller: Caller) -> None:
        """Serve one connection of a guest until it ends. Nothing that a guest does raises."""
        guest = HttpPeer(stream, h11.SERVER)
        try:
            room = self._ledger.connect(caller.owner)
            try:
                while await self._serve_request(guest, caller, room):
                    guest.http.start_next_cycle()
            finally:
                if room.allowed:
                    self._ledger.disconnect(caller.owner)
        except (*CLOSED, h11.ProtocolError, TimeoutError):
            pass
        finally:
            with anyio.move_on_after(1, shield=True):
                await stream.aclose()

    async def _serve_request(self, guest: HttpPeer, caller: Caller, room: Verdict) -> bool:
        """Serve one request; returns whether another may follow."""
        with anyio.fail_after(IDLE_S):
            request = await guest.next_event()
        if not isinstance(request, h11.Request):
            return False
        access = Access(caller, self._ledger)
        try:
            with anyio.fail_after(self._ledger.quotas.time_s):
                _require(room, TOO_MANY)
                await self._carry(guest, request, access)
        except Refusal as refusal:
            access.verdict = refusal.verdict
            await self._answer(guest, refusal.status, refusal.verdict)
            return False
        except LimitReached as error:
            access.verdict = error.verdict
            await self._answer(guest, FORBIDDEN, error.verdict)
            return False
        except TimeoutError:
            access.verdict = refused("time", f"it took longer than {self._ledger.quotas.time_s:g} s")
            return False
        finally:
            self._on_access(access)
        return guest.http.our_state is h11.DONE and guest.http.their_state is h11.DONE

    async def _answer(self, guest: HttpPeer, status: int, verdict: Verdict) -> None:
        """Tell the guest why a request is refused. Clients show little more of a failed CONNECT than its first line."""
        if guest.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        advice = self._advice.get(verdict.rule)
        why = f"{verdict.reason}; {advice}" if advice else verdict.reason
        text = f"mcp-sandbox refused this request ({verdict.rule}): {why}\n".encode()
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(text))), ("Connection", "close")]
        with suppress(*CLOSED, h11.LocalProtocolError):
            reason = f"refused by mcp-sandbox: {verdict.rule}" + (f" ({why})" if advice else "")
            await guest.send(h11.Response(status_code=status, reason=reason, headers=headers))
            await guest.send(h11.Data(data=text))
            await guest.send(h11.EndOfMessage())

    async def _carry(self, guest: HttpPeer, request: h11.Request, access: Access) -> None:
        try:
            if request.method == b"CONNECT":
                await self._tunnel(guest, parse_authority(request.target.decode("ascii")), access)
            else:
                await self._forward(guest, request, access)
        except (BadAuthority, UnicodeDecodeError) as error:
            rule = error.rule if isinstance(error, BadAuthority) else "host-syntax"
            raise Refusal(FORBIDDEN, refused(rule, str(error))) from error
        except dial.DialFailed as error:
            raise Refusal(BAD_GATEWAY, refused(error.rule, str(error))) from error

    async def _admit(self, request: Request, access: Access) -> Sequence[IPAddress]:
        """Decide about a request, once its host's addresses are known; returns them. Raises Refusal, DialFailed."""
        target = request.authority
        access.target = str(target)
        _require(self._ledger.request(access.caller.owner), TOO_MANY)
        access.verdict = decide_name(self._policy, request, self._surroundings)
        addresses: Sequence[IPAddress] = []
        if access.verdict.allowed:
            addresses = [target.address] if target.address is not None else await self._look_up(request, access)
            if addresses or not self._upstream(request):
                access.verdict = decide(self._policy, request, addresses, self._surroundings)
        _require(access.verdict, FORBIDDEN)
        return addresses

    async def _look_up(self, request: Request, access: Access) -> Sequence[IPAddress]:
        """Return a host's addresses; none if only the host's proxy can look names up. Raises Refusal, DialFailed."""
        _require(self._ledger.look_up(access.caller.owner, request.authority.host), TOO_MANY)
        try:
            return await self._resolve(request.authority.host)
        except dial.DialFailed:
            if self._upstream(request):
                return []
            raise

    def _upstream(self, request: Request) -> dial.Upstream | None:
        return dial.upstream_for(request.authority.host, "https" if request.kind == "tunnel" else "http")

    async def _connect(self, request: Request, addresses: Sequence[IPAddress]) -> ByteStream:
        upstream = self._upstream(request)
        if upstream is not None:
            return await dial.connect_through(upstream, request.authority)
        return await dial.connect(addresses, request.authority.port)

    # ---------------------------------------------------------------- tunnels

    async def _tunnel(self, guest: HttpPeer, target: Authority, access: Access) -> None:
        while not isinstance(await guest.next_event(), h11.EndOfMessage):
            pass
        request = Request(target, "tunnel")
        addresses = await self._admit(request, access)
        if target.address is not None:  # TLS names no server then (RFC 6066): say so while the guest still listens
            _require(decide_tls(self._policy, target.host, ClientHello(None, False)), FORBIDDEN)
        server = await self._connect(request, addresses)
        try:
            await guest.send(ESTABLISHED)
            first, hello = await _first_bytes(guest)
            access.verdict = decide_tls(self._policy, target.host, hello)
            if not access.verdict.allowed:
                if hello is not None:  # the guest expects TLS now: the alert is all that it can be told
                    await guest.stream.send(ACCESS_DENIED)
                return
            access.count_sent(len(first))
            await server.send(first)
            await relay(guest.stream, server, access)
        finally:
            await anyio.aclose_forcefully(server)

    # ---------------------------------------------------------------- plain requests

    async def _forward(self, guest: HttpPeer, request: h11.Request, access: Access) -> None:
        url = _split(request.target)
        if url.scheme not in ("http", "https"):
            raise Refusal(BAD_REQUEST, refused("scheme", "send CONNECT, or a request for an http:// address"))
        secure = url.scheme == "https"
        target = parse_authority(url.netloc, HTTPS_PORT if secure else HTTP_PORT)
        secrets = self._secrets.get(target.host, ()) if secure else ()
        if secure and not secrets:
            raise Refusal(BAD_REQUEST, refused("scheme", "use CONNECT for https"))
        self._check_host_header(request, target, url.scheme)
        asked = Request(target, "tunnel" if secure else "http")
        addresses = await self._admit(asked, access)
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        upstream = None if secure else self._upstream(asked)
        headers = end_to_end(request.headers)
        if upstream is not None:  # it takes the whole address, of which it must read no other host than we did
            path = f"http://{target}{path}"
            headers += [(name.encode(), value.encode()) for name, value in upstream.headers()]
            stream = await dial.connect_to_proxy(upstream)
        else:
            stream = await self._connect(asked, addresses)
        try:
            if secure:
                stream = await TLSStream.wrap(
                    stream, hostname=target.host, ssl_context=self._tls, standard_compatible=False
                )
            outgoing = fill_in(secrets, h11.Request(method=request.method, target=path, headers=headers))
            await forward(guest, HttpPeer(stream, h11.CLIENT), outgoing, access)
        except (ssl.SSLError, h11.RemoteProtocolError) as error:
            raise Refusal(BAD_GATEWAY, refused("bad-server", "the server does not speak proper HTTP or TLS")) from error
        finally:
            await anyio.aclose_forcefully(stream)

    def _check_host_header(self, request: h11.Request, target: Authority, scheme: str) -> None:
        """A server may choose a site by the Host header alone, so it must be the host that is decided about."""
        hosts = [value.decode("ascii") for name, value in request.headers if name.lower() == b"host"]
        port = HTTPS_PORT if scheme == "https" else HTTP_PORT
        if [parse_authority(host, port) for host in hosts] != [target]:
            raise Refusal(FORBIDDEN, refused("host-mismatch", "the Host header names another host than the address"))


def _split(target: bytes) -> SplitResult:
    """Return the parts of a request's target. Raises BadAuthority."""
    try:
        return urlsplit(target.decode("ascii"))
    except ValueError as error:
        raise BadAuthority("host-syntax", "the target is not an address") from error


def _require(verdict: Verdict, status: int) -> None:
    if not verdict.allowed:
        raise Refusal(status, verdict)


async def _first_bytes(guest: HttpPeer) -> tuple[bytes, ClientHello | None]:
    """Return the first bytes of a tunnel, and the ClientHello in them, if they are TLS."""
    reader, more = HelloReader(), guest.unread
    with anyio.fail_after(HELLO_S):
        while True:
            try:
                hello = reader.feed(more)
            except NotTls:
                return bytes(reader.data), None
            if hello is not None:
                return bytes(reader.data), hello
            more = await guest.stream.receive()
