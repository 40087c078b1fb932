"""What hostile code asks a bridge for, case by case, the rule that refuses it, and the world that it must not reach.

A request is what a client sends first. `{port}` in it becomes the port of `site.test`, the one site to be reached.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.abc import ByteStream, SocketAttribute

from tests.unit.test_web_client_hello import hello, with_extension
from tests.unit.test_web_policy import ADDRESSES, MALFORMED, SPELLINGS
from tests.web.world import World
from websearch.client_hello import ACCESS_DENIED
from websearch.quotas import Quotas

# The one site is at an address of loopback that the operator allows. All others are refused.
SITE_ADDRESS = "127.0.0.9"
CLOSED = "closed without an answer"  # not even HTTP


@dataclass(frozen=True, slots=True)
class Case:
    """One attempt, what it says once a tunnel stands, and how it ends."""

    request: bytes
    rule: str
    then: bytes = b""

    def check(self, answer: bytes, rules: Sequence[str]) -> None:
        """Fail unless this is how the attempt has to end: what came back, and the rules that the bridge recorded."""
        if self.rule == CLOSED:
            assert list(rules) == []
            assert b" 200 " not in answer.partition(b"\r\n")[0]
            return
        assert list(rules) == [self.rule]
        if self.then:  # the tunnel stood; what was said in it does not fit
            said = b"" if self.rule == "tls-missing" else ACCESS_DENIED
            assert answer.partition(b"\r\n\r\n")[2] == said
        else:
            assert f" refused by mcp-sandbox: {self.rule}\r\n".encode() in answer


def connect(authority: str) -> bytes:
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()


def get(address: str, host: str, extra: str = "") -> bytes:
    return f"GET {address} HTTP/1.1\r\nHost: {host}\r\n{extra}\r\n".encode()


# A name for each address that must not be reached.
NAMES = {
    address: f"name-{number}.test"
    for number, address in enumerate(address for many in ADDRESSES.values() for address in many.split())
}
# What is no text of HTTP does not become a request at all.
UNREADABLE = {"a space", "a null byte", "a line break"}
DATA = "4f6e6520646179206f6c6420736563726574.evil.net"
PORTS = (1, 21, 22, 25, 53, 3128, 6379, 8080, 65535)
INTERNAL = ("localhost", "intranet", "printer.local", "metadata.google.internal", "db.lan", "1.0.0.10.in-addr.arpa")
DENIED = ("denied.test", "DENIED.test.", "a.tracker.test", "b.a.tracker.test")
LITERALS = ("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "[fd00:ec2::254]")
LITERAL_RULES = ("loopback", "private", "metadata", "unspecified", "loopback", "loopback", "metadata")

SITE = b"CONNECT site.test:{port} HTTP/1.1\r\nHost: site.test:{port}\r\n\r\n"
TUNNELS = {
    "a tunnel to another server than it names": Case(SITE, "tls-sni-mismatch", hello("other.test")),
    "a tunnel to a longer name": Case(SITE, "tls-sni-mismatch", hello("site.test.evil.net")),
    "a tunnel without a server name": Case(SITE, "tls-no-sni", hello(None)),
    "a tunnel with an encrypted server name": Case(SITE, "tls-ech", with_extension(hello("site.test"), 0xFE0D, b"x")),
    "a tunnel for SSH": Case(SITE, "tls-missing", b"SSH-2.0-client\r\n"),
    "a tunnel for HTTP": Case(SITE, "tls-missing", b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n"),
    "a tunnel for SMTP": Case(SITE, "tls-missing", b"EHLO evil.net\r\n"),
    "a tunnel for null bytes": Case(SITE, "tls-missing", bytes(1000)),
    "a tunnel for TLS without a hello": Case(SITE, "tls-missing", b"\x16\x03\x01\x00\x04\x02\x00\x00\x00"),
}
REQUESTS = {
    "a page of an odd address": Case(get("http://0x7f.1/", "0x7f.1"), "ip-notation"),
    "a page behind a user name": Case(get("http://site.test@127.0.0.1/", "site.test"), "host-syntax"),
    "a page under another host header": Case(get("http://site.test/", "other.test"), "host-mismatch"),
    "a page under another port": Case(get("http://site.test/", "site.test:8080"), "host-mismatch"),
    "https without a tunnel": Case(get("https://site.test/", "site.test"), "scheme"),
    "a path alone": Case(get("/", "site.test"), "scheme"),
    "ftp": Case(get("ftp://site.test/", "site.test"), "scheme"),
    "a file": Case(get("file:///etc/passwd", "site.test"), "scheme"),
    "gopher": Case(get("gopher://site.test/", "site.test"), "scheme"),
    "a page of a private name": Case(get("http://db.internal/", "db.internal"), "host-internal"),
    "a page on loopback": Case(get("http://127.0.0.1/", "127.0.0.1"), "address-loopback"),
    "the metadata service": Case(get("http://169.254.169.254/latest/", "169.254.169.254"), "address-metadata"),
    "a name that carries data": Case(connect(f"{DATA}:443"), "dns-label"),
    "a page whose name carries data": Case(get(f"http://{DATA}/", DATA), "dns-label"),
    "a name that does not exist": Case(connect("unknown.test:443"), "dns"),
    "a name with a public and a private address": Case(connect("mixed.test:443"), "address-private"),
    "two host headers": Case(get("http://site.test/", "site.test", "Host: other.test\r\n"), CLOSED),
    "no host header": Case(b"GET http://site.test/ HTTP/1.1\r\n\r\n", CLOSED),
    "two lengths": Case(get("http://site.test/", "site.test", "Content-Length: 1\r\nContent-Length: 2\r\n"), CLOSED),
    "a folded header": Case(get("http://site.test/", "site.test", "X: 1\r\n\x00: 2\r\n"), CLOSED),
    "binary garbage": Case(b"\x00\x01\x02garbage\r\n\r\n", CLOSED),
    "TLS to the proxy": Case(hello("site.test"), CLOSED),
    "SOCKS": Case(b"\x05\x01\x00\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50\r\n\r\n", CLOSED),
    "a line without an end": Case(b"A" * 100_000, CLOSED),
    "headers without an end": Case(b"GET http://site.test/ HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, CLOSED),
}


def _cases() -> dict[str, Case]:
    cases = {**REQUESTS, **TUNNELS}
    for what, text in SPELLINGS.items():
        cases[f"an address, {what}"] = Case(connect(text), "ip-notation" if text.isascii() else CLOSED)
    for what, text in MALFORMED.items():
        readable = text.isascii() and what not in UNREADABLE
        cases[f"a host, {what}"] = Case(connect(text), "host-syntax" if readable else CLOSED)
    for kind, many in ADDRESSES.items():
        for address in many.split():
            cases[f"a name of {kind} {address}"] = Case(connect(f"{NAMES[address]}:443"), f"address-{kind}")
    for literal, kind in zip(LITERALS, LITERAL_RULES, strict=True):
        cases[f"the address {literal}"] = Case(connect(f"{literal}:443"), f"address-{kind}")
    for port in PORTS:
        cases[f"port {port}"] = Case(connect(f"site.test:{port}"), "port")
    for name in INTERNAL:
        cases[f"the name {name}"] = Case(connect(f"{name}:443"), "host-internal")
    for name in DENIED:
        cases[f"the denied {name}"] = Case(connect(f"{name}:443"), "domain-denied")
    return cases


CASES = _cases()


@dataclass(frozen=True)
class Target:
    """The world in which code is hostile, with its one site."""

    world: World
    port: int
    arrived: bytearray  # at the site

    def request(self, case: Case) -> bytes:
        """Return what a case sends first."""
        return case.request.replace(b"{port}", b"%d" % self.port)

    def check_nothing_left(self) -> None:
        """Fail if anything of all attempts came to the site, or was looked up though its name carries data."""
        assert self.arrived == b""
        assert not any("evil.net" in name for name in self.world.lookups)
        assert not any(access.verdict.allowed for access in self.world.accesses)


@asynccontextmanager
async def serving_target() -> AsyncIterator[Target]:
    """Make that world, for as long as the site is served."""
    world = World(
        names={name: [address] for address, name in NAMES.items()}
        | {"site.test": [SITE_ADDRESS], "mixed.test": ["93.184.216.34", "10.0.0.1"]},
        quotas=Quotas(names_per_minute=len(CASES)),  # so that each is refused for what it asks
        policy={"networks": {"tests": f"{SITE_ADDRESS}/32"}, "deny": ["denied.test", "*.tracker.test"]},
    )
    arrived = bytearray()

    async def site(stream: ByteStream) -> None:
        async with stream:
            async for data in stream:
                arrived.extend(data)

    listener = await anyio.create_tcp_listener(local_host=SITE_ADDRESS)
    port = listener.extra(SocketAttribute.local_port)
    world.ports.add(port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, site)
        yield Target(world, port, arrived)
        tasks.cancel_scope.cancel()
