"""The bridge, between real sockets on loopback: a guest's end, and sites that the tests serve."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import h11
import pytest
import trustme
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSStream

from tests.unit.test_web_client_hello import hello
from tests.web.sites import Page, answering, head_of, pages, serving, serving_tls, trusting
from tests.web.world import World, forget_proxies
from websearch.access import Caller
from websearch.authority import parse_authority
from websearch.client_hello import ACCESS_DENIED
from websearch.policy import Surroundings
from websearch.quotas import Quotas
from websearch.secrets import Secret, fill_in

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(monkeypatch) -> World:
    forget_proxies(monkeypatch)
    return World(names={"site.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]})


@asynccontextmanager
async def guest(world: World, caller: Caller | None = None) -> AsyncIterator[ByteStream]:
    """Yield a guest's end of a connection to the bridge."""
    bridge = world.bridge()

    async def serve(stream: ByteStream) -> None:
        await bridge.serve(stream, caller or Caller("ada", "sb-1"))

    with anyio.fail_after(60):
        async with serving(serve) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
            yield stream


async def read_all(stream: ByteStream) -> bytes:
    data = b""
    try:
        while True:
            data += await stream.receive()
    except anyio.EndOfStream:
        return data


async def ask(world: World, request: bytes) -> bytes:
    """Send bytes to the bridge and return all that it answers."""
    async with guest(world) as stream:
        await stream.send(request)
        return await read_all(stream)


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Kept: yes\r\nConnection: X-Own\r\nX-Own: no\r\n\r\nhello"


def get(port: int, host: str = "site.test", extra: str = "Connection: close\r\n") -> bytes:
    return f"GET http://{host}:{port}/a?b=c HTTP/1.1\r\nHost: {host}:{port}\r\n{extra}\r\n".encode()


async def test_a_plain_request_is_forwarded_without_headers_of_the_connection(world):
    seen: list[bytes] = []
    async with serving(answering(PLAIN, seen)) as port:
        world.ports = {port}
        answer = await ask(world, get(port, extra="Proxy-Authorization: x\r\nX-Mine: 1\r\nConnection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"hello")
    assert b"x-kept: yes" in answer.lower()
    assert b"x-own" not in answer.lower()
    assert seen[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
    assert b"x-mine: 1" in seen[0].lower()
    assert b"proxy-authorization" not in seen[0].lower()
    assert world.rules == ["network:tests"]
    assert world.accesses[0].target == f"site.test:{port}"
    assert world.accesses[0].received == len(PLAIN) - len(b"HTTP/1.1 200 OK\r\n\r\n")


async def test_a_request_with_a_body_is_forwarded(world):
    seen: list[bytes] = []

    async def site(stream: ByteStream) -> None:
        async with stream:
            buffered = BufferedByteReceiveStream(stream)
            head = await buffered.receive_until(b"\r\n\r\n", 65536)
            assert b"content-length: 4" in head.lower()
            seen.append(await buffered.receive_exactly(4))
            await stream.send(PLAIN)

    async with serving(site) as port:
        world.ports = {port}
        request = f"POST http://site.test:{port}/ HTTP/1.1\r\nHost: site.test:{port}\r\nContent-Length: 4\r\n\r\n"
        async with guest(world) as stream:
            await stream.send(request.encode())
            await stream.send(b"data")
            assert (await head_of(stream)).startswith(b"HTTP/1.1 200")
    assert seen == [b"data"]


async def test_requests_follow_each_other_on_one_connection_and_each_is_decided(world):
    async with serving(answering(PLAIN)) as port:
        world.ports = {port}
        async with guest(world) as stream:
            await stream.send(get(port, extra=""))
            buffered = BufferedByteReceiveStream(stream)
            await buffered.receive_until(b"\r\n\r\n", 65536)
            assert await buffered.receive_exactly(5) == b"hello"
            await stream.send(get(port, host="unknown.test", extra=""))
            assert b" 502 " in await buffered.receive_until(b"\r\n\r\n", 65536)
    assert world.rules == ["network:tests", "dns"]


async def test_a_tunnel_carries_bytes_both_ways(world):
    first = hello("site.test")

    async def site(stream: ByteStream) -> None:
        async with stream:
            buffered = BufferedByteReceiveStream(stream)
            assert await buffered.receive_exactly(len(first)) == first
            await stream.send(b"server says hello")
            assert await buffered.receive_exactly(4) == b"more"
            await stream.send(b"!")

    async with serving(site) as port:
        world.ports = {port}
        async with guest(world) as stream:
            await stream.send(f"CONNECT site.test:{port} HTTP/1.1\r\nHost: site.test:{port}\r\n\r\n".encode())
            assert (await head_of(stream)).startswith(b"HTTP/1.1 200 ")
            await stream.send(first)
            assert await stream.receive() == b"server says hello"
            await stream.send(b"more")
            assert await read_all(stream) == b"!"
    assert world.rules == ["tls"]
    assert (world.accesses[0].sent, world.accesses[0].received) == (len(first) + 4, 18)


@pytest.mark.parametrize(
    ("first", "rule", "said"),
    [
        (hello("other.test"), "tls-sni-mismatch", ACCESS_DENIED),
        (hello(None), "tls-no-sni", ACCESS_DENIED),
        (b"SSH-2.0-client\r\n", "tls-missing", b""),
        (b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n", "tls-missing", b""),
    ],
)
async def test_a_tunnel_to_another_server_than_it_names_carries_nothing(world, first, rule, said):
    received: list[bytes] = []

    async def site(stream: ByteStream) -> None:
        async with stream:
            received.append(await read_all(stream))

    async with serving(site) as port:
        world.ports = {port}
        async with guest(world) as stream:
            await stream.send(f"CONNECT site.test:{port} HTTP/1.1\r\nHost: site.test:{port}\r\n\r\n".encode())
            await head_of(stream)
            await stream.send(first)
            assert await read_all(stream) == said
    assert world.rules == [rule]
    assert b"".join(received) == b""


async def test_a_client_of_a_refused_tunnel_reads_an_alert(world, authority):
    async with serving_tls(authority, "site.test", answering(PLAIN)) as port:
        world.ports = {port}
        async with guest(world) as stream:
            await stream.send(f"CONNECT site.test:{port} HTTP/1.1\r\nHost: site.test:{port}\r\n\r\n".encode())
            await head_of(stream)
            with pytest.raises(ssl.SSLError, match="alert access denied"):
                await TLSStream.wrap(stream, hostname="other.test", ssl_context=trusting(authority))


async def test_a_tunnel_to_an_address_is_refused_at_once_because_tls_names_no_server(world):
    world.ports = {1}
    answer = await ask(world, b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 refused by mcp-sandbox: tls-no-sni\r\n")
    assert world.rules == ["tls-no-sni"]


async def test_a_refusal_names_its_rule_in_the_first_line(world):
    world.policy = {"allow": ["site.test"]}
    answer = await ask(world, b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 refused by mcp-sandbox: domain-not-allowed\r\n")
    assert b"evil.test is not among the allowed domains" in answer
    assert world.lookups == []


@pytest.mark.parametrize(
    ("request_line", "rule"),
    [
        ("CONNECT 127.1:443 HTTP/1.1\r\nHost: 127.1:443", "ip-notation"),
        ("CONNECT site.test HTTP/1.1\r\nHost: site.test", "host-syntax"),
        ("CONNECT site.test:22 HTTP/1.1\r\nHost: site.test:22", "port"),
        ("GET http://0x7f.1/ HTTP/1.1\r\nHost: 0x7f.1", "ip-notation"),
        ("GET http://site.test@127.0.0.1/ HTTP/1.1\r\nHost: site.test", "host-syntax"),
        ("GET http://[ HTTP/1.1\r\nHost: site.test", "host-syntax"),
        ("GET http://site.test/ HTTP/1.1\r\nHost: other.test", "host-mismatch"),
        ("GET http://site.test/ HTTP/1.1\r\nHost: site.test:8080", "host-mismatch"),
        ("GET https://site.test/ HTTP/1.1\r\nHost: site.test", "scheme"),
        ("GET / HTTP/1.1\r\nHost: site.test", "scheme"),
        ("GET ftp://site.test/ HTTP/1.1\r\nHost: site.test", "scheme"),
        ("GET http://db.internal/ HTTP/1.1\r\nHost: db.internal", "host-internal"),
    ],
)
async def test_a_request_that_may_not_be_made_is_refused(world, request_line, rule):
    answer = await ask(world, f"{request_line}\r\n\r\n".encode())
    assert f": {rule}\r\n".encode() in answer
    assert world.rules == [rule]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02garbage\r\n\r\n",
        b"GET http://site.test/ HTTP/1.1\r\nHost: site.test\r\nHost: other.test\r\n\r\n",
        b"GET http://site.test/ HTTP/1.1\r\n\r\n",
        b"POST http://site.test/ HTTP/1.1\r\nHost: site.test\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"A" * 100_000,
    ],
)
async def test_garbage_ends_the_connection_and_reaches_no_server(world, garbage):
    answer = await ask(world, garbage)
    assert b"200" not in answer.partition(b"\r\n")[0]
    assert world.lookups == []


async def test_a_name_is_looked_up_once_and_the_checked_address_is_used(world):
    async with serving(answering(PLAIN)) as port:
        world.ports = {port}
        answers = iter([["127.0.0.1"], ["10.0.0.1"]])
        original = world.resolve

        async def rebinding(host):
            world.names["site.test"] = next(answers)
            return await original(host)

        world.resolve = rebinding
        assert (await ask(world, get(port))).endswith(b"hello")
    assert world.lookups == ["site.test"]


async def test_a_name_with_a_private_address_is_refused(world):
    world.names["evil.test"] = ["93.184.216.34", "10.0.0.1"]
    await ask(world, b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n")
    assert world.rules == ["address-private"]


async def test_an_address_that_does_not_answer_does_not_hold_up_the_others(world):
    async with serving(answering(PLAIN)) as port:
        world.ports = {port}
        world.names["site.test"] = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]  # the server listens on the last one
        assert (await ask(world, get(port))).endswith(b"hello")


async def test_a_response_over_the_limit_is_cut_off(world):
    response = b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + b"x" * 3_000_000
    async with serving(answering(response)) as port:
        world.ports, world.quotas = {port}, Quotas(response_bytes=1_000_000)
        answer = await ask(world, get(port))
    assert len(answer) < 1_200_000
    assert world.rules == ["response-bytes"]


async def test_an_endless_response_is_cut_off(world):
    async def site(stream: ByteStream) -> None:
        async with stream:
            await head_of(stream)
            await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while True:
                    await stream.send(b"x" * 65536)

    async with serving(site) as port:
        world.ports, world.quotas = {port}, Quotas(response_bytes=1_000_000)
        await ask(world, get(port))
    assert world.rules == ["response-bytes"]


async def test_a_request_over_the_limit_is_refused(world):
    async def site(stream: ByteStream) -> None:
        async with stream:
            await read_all(stream)

    async with serving(site) as port:
        world.ports, world.quotas = {port}, Quotas(request_bytes=1000)
        head = f"POST http://site.test:{port}/ HTTP/1.1\r\nHost: site.test:{port}\r\nContent-Length: 5000\r\n\r\n"
        answer = await ask(world, head.encode() + b"x" * 5000)
    assert b" 403 refused by mcp-sandbox: request-bytes" in answer


@pytest.mark.parametrize("limit", ["request_bytes", "response_bytes"])
async def test_headers_count_as_what_is_carried(world, limit):
    long = "x" * 5000
    async with serving(pages({"/a?b=c": Page(headers={"X-Long": long})})) as port:
        world.ports, world.quotas = {port}, Quotas(**{limit: 1000})
        await ask(world, get(port, extra=f"X-Long: {long}\r\nConnection: close\r\n"))
    assert world.rules == [limit.replace("_", "-")]


async def test_a_server_that_never_answers_costs_the_time_limit(world):
    async def site(stream: ByteStream) -> None:
        async with stream:
            await read_all(stream)

    async with serving(site) as port:
        world.ports, world.quotas = {port}, Quotas(time_s=0.2)
        await ask(world, get(port))
    assert world.rules == ["time"]


@pytest.mark.parametrize(
    "response",
    [b"", b"not http\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", b"HTTP/1.1 999999 x\r\n\r\n"],
)
async def test_a_server_that_does_not_speak_http_gives_no_whole_answer(world, response):
    async with serving(answering(response)) as port:
        world.ports = {port}
        answer = await ask(world, get(port))
    assert not answer or b" 502 " in answer.partition(b"\r\n")[0] or answer.endswith(b"short")


async def test_an_owner_has_so_many_connections_and_no_more(world):
    world.quotas = Quotas(connections=0)
    assert b" 429 refused by mcp-sandbox: quota-connections" in await ask(world, get(80))


async def test_an_owner_has_so_many_requests_a_minute(world):
    world.quotas = Quotas(requests_per_minute=1)
    async with serving(answering(PLAIN)) as port:
        world.ports = {port}
        async with guest(world) as stream:
            await stream.send(get(port, extra=""))
            await BufferedByteReceiveStream(stream).receive_exactly(5)
            await stream.send(get(port, extra=""))
            await read_all(stream)
    assert world.rules == ["network:tests", "quota-requests"]


async def test_an_owner_carries_no_data_out_in_many_names(world):
    world.quotas = Quotas(names_per_minute=2)
    bridge = world.bridge()
    world.bridge = lambda: bridge
    for number in (1, 2, 3, 1):
        target = f"part-{number}.evil.test:443"
        await ask(world, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    assert world.rules == ["dns", "dns", "quota-names", "dns"]
    assert world.lookups == ["part-1.evil.test", "part-2.evil.test", "part-1.evil.test"]


async def test_connections_go_through_the_hosts_own_proxy(world, monkeypatch):
    seen: list[bytes] = []
    first = hello("far.test")

    async def proxy(stream: ByteStream) -> None:
        async with stream:
            seen.append(await head_of(stream))
            await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
            await stream.send(await stream.receive())

    async with serving(proxy) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:pass%40@127.0.0.1:{port}")
        async with guest(world) as stream:
            await stream.send(b"CONNECT far.test:443 HTTP/1.1\r\nHost: far.test:443\r\n\r\n")
            assert (await head_of(stream)).startswith(b"HTTP/1.1 200 ")
            await stream.send(first)
            assert await read_all(stream) == first
    assert seen[0].startswith(b"CONNECT far.test:443 HTTP/1.1\r\n")
    assert b"Authorization: Basic dXNlcjpwYXNzQA==" in seen[0]
    assert world.lookups == ["far.test"]


async def test_the_hosts_own_proxy_is_asked_for_the_host_that_was_decided_about(world, monkeypatch):
    seen: list[bytes] = []
    async with serving(answering(PLAIN, seen)) as port:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        request = b"GET http://far.test#@evil.test/ HTTP/1.1\r\nHost: far.test\r\nConnection: close\r\n\r\n"
        assert (await ask(world, request)).endswith(b"hello")
    assert seen[0].startswith(b"GET http://far.test:80/ HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("target", "rule"), [("proxy.test:443", "bridge"), ("far.test:22", "port"), ("bad.test:443", "domain-denied")]
)
async def test_what_only_the_hosts_own_proxy_can_look_up_is_decided_by_name(world, monkeypatch, target, rule):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.test:443")
    world.policy = {"deny": ["bad.test"]}
    world.surroundings = Surroundings(bridge={parse_authority("proxy.test:443")})
    await ask(world, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    assert world.rules == [rule]


async def test_the_hosts_own_proxy_is_not_asked_for_private_names(world, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    world.names["sneaky.test"] = ["10.0.0.1"]
    await ask(world, b"CONNECT sneaky.test:443 HTTP/1.1\r\nHost: sneaky.test:443\r\n\r\n")
    assert world.rules == ["address-private"]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def key_in(**place: str) -> dict[str, list[Secret]]:
    return {"site.test": [Secret("{search-key}", "s3cret", path="/search", **place)]}


async def test_a_key_is_added_to_requests_for_its_host_alone(world, authority):
    seen: list[bytes] = []
    world.secrets = key_in(header="x-key")
    world.tls = trusting(authority)
    async with (
        serving_tls(authority, "site.test", answering(PLAIN, seen)) as port,
        serving(answering(PLAIN, seen)) as other,
    ):
        world.ports = {port, other}
        request = f"GET https://site.test:{port}/search HTTP/1.1\r\nHost: site.test:{port}\r\n"
        answer = await ask(world, f"{request}X-Key: {{search-key}}\r\nConnection: close\r\n\r\n".encode())
        await ask(world, get(other, "other.test", "X-Key: {search-key}\r\nConnection: close\r\n"))
        await ask(world, get(other, "site.test", "X-Key: {search-key}\r\nConnection: close\r\n"))
    assert answer.endswith(b"hello")
    assert b"X-Key: s3cret" in seen[0].replace(b"x-key", b"X-Key")
    assert [b"s3cret" in head for head in seen] == [True, False, False]
    assert "s3cret" not in repr(world.secrets)


@pytest.mark.parametrize(
    ("place", "request_line", "filled"),
    [
        (
            {"parameter": "key"},
            "GET https://site.test:{port}/search?q=a&key={search-key}",
            b"GET /search?q=a&key=s3cret ",
        ),
        # Places that a provider may repeat in its answer: the query, another header, a path it does not know.
        ({"parameter": "key"}, "GET https://site.test:{port}/search?q={search-key}", None),
        ({"parameter": "key"}, "GET https://site.test:{port}/search?key=a{search-key}", None),
        ({"parameter": "key"}, "GET https://site.test:{port}/other?key={search-key}", None),
        ({"parameter": "key"}, "GET https://site.test:{port}/{search-key}", None),
        ({"header": "x-other"}, "GET https://site.test:{port}/search?key={search-key}", None),
    ],
)
async def test_a_key_is_put_only_where_it_belongs(world, authority, place, request_line, filled):
    seen: list[bytes] = []
    world.secrets, world.tls = key_in(**place), trusting(authority)
    async with serving_tls(authority, "site.test", answering(PLAIN, seen)) as port:
        world.ports = {port}
        line = request_line.replace("{port}", str(port))
        headers = f"Host: site.test:{port}\r\nX-Key: {{search-key}}\r\nConnection: close\r\n"
        assert (await ask(world, f"{line} HTTP/1.1\r\n{headers}\r\n".encode())).endswith(b"hello")
    assert (b"s3cret" in seen[0]) == (filled is not None)
    assert seen[0].startswith(filled or b"GET ")


@pytest.mark.parametrize(("method", "filled"), [("GET", True), ("POST", True), ("TRACE", False), ("OPTIONS", False)])
def test_only_requests_that_search_carry_a_key(method, filled):
    secrets = key_in(header="x-key")["site.test"]
    headers = [("Host", "site.test"), ("X-Key", "{search-key}")]
    request = fill_in(secrets, h11.Request(method=method, target="/search", headers=headers))
    assert (dict(request.headers)[b"x-key"] == b"s3cret") == filled


async def test_a_key_is_not_sent_to_a_server_without_a_valid_certificate(world, authority):
    seen: list[bytes] = []
    world.secrets = key_in(header="x")
    async with serving_tls(authority, "site.test", answering(PLAIN, seen)) as port:
        world.ports = {port}  # and the bridge does not know the tests' authority
        request = f"GET https://site.test:{port}/search HTTP/1.1\r\nHost: site.test:{port}\r\nX: {{search-key}}\r\n\r\n"
        answer = await ask(world, request.encode())
    assert b" 502 refused by mcp-sandbox: bad-server" in answer
    assert seen == []


async def test_a_log_line_has_everything_about_a_request(world, caplog):
    caplog.set_level("INFO", logger="websearch.access")
    await ask(world, get(22))
    world.accesses[0].write_log()
    assert "owner=ada sandbox=sb-1 target=site.test:22 verdict=refused rule=port sent=0 received=0" in caplog.text
