"""Fetching through the bridge, with real workers: redirects, limits, and servers that misbehave."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from ipaddress import ip_network
from typing import Any

import brotli
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.config import WebSettings
from mcp_sandbox.errors import (
    BadRequest,
    FetchDns,
    FetchError,
    FetchFailed,
    FetchHttpStatus,
    FetchRefused,
    FetchRobots,
    FetchTimeout,
    FetchTls,
    FetchTooLarge,
)
from mcp_sandbox.views import PageView
from mcp_sandbox.web.fetching import FetchRequest
from mcp_sandbox.web.opening import open_web
from mcp_sandbox.web.web import Web
from tests.waiting import HANG_S
from tests.web.local_machine import LocalMachines
from tests.web.sites import GONE, Page, head_of, pages
from tests.web.world import World, forget_proxies
from websearch.policy import Surroundings

pytestmark = pytest.mark.anyio

TEXT = {"Content-Type": "text/plain"}
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def endless(stream: ByteStream) -> None:
    """Send a page that never ends."""
    async with stream:
        await head_of(stream)
        try:
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
            while True:
                await stream.send(b"more " * 10_000)
        except GONE:
            pass


async def silent(stream: ByteStream) -> None:
    """Take a request and say nothing."""
    async with stream:
        await head_of(stream)
        with suppress(*GONE):
            await stream.receive()


SITE = {
    "/": Page(b"hello", headers=TEXT),
    "/robots.txt": Page(b"User-agent: *\nDisallow: /private\n", headers=TEXT),
    "/private": Page(b"private", headers=TEXT),
    "/two": Page(status="302 Found", headers={"Location": "/one"}),
    "/one": Page(status="301 Moved Permanently", headers={"Location": "/"}),
    "/loop": Page(status="302 Found", headers={"Location": "/loop"}),
    "/metadata": Page(status="302 Found", headers={"Location": "http://169.254.169.254/latest/meta-data"}),
    "/inside": Page(status="302 Found", headers={"Location": "http://10.1.2.3/"}),
    "/nonsense": Page(status="302 Found", headers={"Location": "http://[::1/"}),
    "/spaces": Page(status="302 Found", headers={"Location": "/with a space?and=é more"}),
    "/with%20a%20space": Page(b"found", headers=TEXT),
    "/wide": Page(status="302 Found", headers={"Location": "/long?" + "x" * 3000}),
    "/file": Page(status="302 Found", headers={"Location": "file:///etc/passwd"}),
    "/gone": Page(b"gone", status="410 Gone"),
    "/broken": Page(b"error", status="500 Oops\tnever mind"),
    "/large": Page(b"x" * (2 * MIB), headers=TEXT),
    "/claims": Page(b"x", headers={**TEXT, "Content-Length": str(1 << 40)}),
    "/short": Page(b"only this", headers={**TEXT, "Content-Length": "1000"}),
    "/bomb": Page(brotli.compress(bytes(100 * MIB)), headers={**TEXT, "Content-Encoding": "br"}),
    "/cookie": Page(status="302 Found", headers={"Location": "/", "Set-Cookie": "a=1"}),
    "/imitation": Page(b"x", status="403 refused by mcp-sandbox: made-up"),
    "/odd": Page("Grüße".encode("latin-1"), headers={"Content-Type": "text/plain; charset=latin-1"}),
    "/long": Page("".join(chr(0x4E00 + n % 500) for n in range(1000)).encode(), headers=TEXT),
}


class Sites(World):
    """The world of these tests, and the web tools in it."""

    plain: str
    secure: str
    endless: str
    silent: str
    web: Web
    polite: Web
    hasty: Web
    seen: list[str]


@pytest.fixture(scope="module")
async def sites(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sites]:
    sites = Sites()
    sites.seen = []
    authority = tmp_path_factory.mktemp("web") / "authority.pem"
    authority.write_bytes(sites.authority_pem)
    with pytest.MonkeyPatch.context() as patch:
        forget_proxies(patch)
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            sites.plain = await enter(
                sites.site("plain.example", pages(lambda path: SITE.get(path.partition("?")[0]), sites.seen))
            )
            sites.secure = await enter(sites.site("secure.example", pages(SITE), secure=True))
            sites.endless = await enter(sites.site("endless.example", endless))
            sites.silent = await enter(sites.site("silent.example", silent))
            settings = WebSettings(
                ports=tuple({80, 443, *sites.ports}),
                private_networks={"tests": ip_network("127.0.0.0/8")},
                deny_domains=("denied.example",),
                max_bytes=MIB,
                timeout_s=HANG_S,
                ca_file=authority,
            )
            variants: dict[str, dict[str, object]] = {
                "web": {},
                "polite": {"respect_robots": True},
                "hasty": {"timeout_s": 0.5},
            }
            for name, change in variants.items():
                changed = settings.model_copy(update=change)
                opening = open_web(changed, LocalMachines(), Surroundings, sites.accesses.append, sites.resolve)
                setattr(sites, name, await enter(opening))
            yield sites


async def fetch(web: Web, url: str, **fields: Any) -> PageView:
    return (await web.fetch("ann", FetchRequest(url=url, **fields)))[0]


async def test_redirects_are_followed_and_recorded(sites: Sites):
    view = await fetch(sites.web, f"{sites.plain}/two")
    assert (view.text, view.status, view.final_url) == ("hello", 200, f"{sites.plain}/")
    assert [(each.status, each.url) for each in view.redirects] == [
        (302, f"{sites.plain}/one"),
        (301, f"{sites.plain}/"),
    ]


@pytest.mark.parametrize(("path", "rule"), [("/metadata", "address-metadata"), ("/inside", "address-private")])
async def test_a_redirect_to_an_address_that_is_not_public_is_refused_with_its_rule(sites: Sites, path: str, rule: str):
    with pytest.raises(FetchRefused) as refused:
        await fetch(sites.web, f"{sites.plain}{path}")
    assert refused.value.rule == rule


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://169.254.169.254/", "address-metadata"),
        ("https://10.0.0.1/", "address-private"),
        ("http://plain.example:22/", "port"),
        ("http://denied.example/", "domain-denied"),
        ("http://intranet/", "host-internal"),
    ],
)
async def test_the_policy_refuses_an_address_with_its_rule(sites: Sites, url: str, rule: str):
    with pytest.raises(FetchRefused) as refused:
        await fetch(sites.web, url)
    assert refused.value.rule == rule


@pytest.mark.parametrize("path", ["/loop", "/file", "/nonsense"])
async def test_redirects_that_lead_nowhere_are_an_error(sites: Sites, path: str):
    with pytest.raises(FetchFailed):
        await fetch(sites.web, f"{sites.plain}{path}")


async def test_addresses_with_spaces_and_other_letters_are_encoded(sites: Sites):
    view = await fetch(sites.web, f"{sites.plain}/spaces")
    assert (view.text, view.final_url) == ("found", f"{sites.plain}/with%20a%20space?and=%C3%A9%20more")
    again = await fetch(sites.web, f"{sites.plain}/with a space?and=é%20more")
    assert (again.text, again.url) == ("found", view.final_url)


async def test_a_long_address_is_cut_off_where_it_is_shown(sites: Sites):
    view = await fetch(sites.web, f"{sites.plain}/wide")
    assert (view.total_chars, len(view.final_url), len(view.redirects[0].url)) == (1000, 2000, 2000)


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/gone", 410), ("/broken", 500)])
async def test_an_error_of_the_server_has_its_status(sites: Sites, path: str, status: int):
    with pytest.raises(FetchHttpStatus) as failed:
        await fetch(sites.web, f"{sites.plain}{path}")
    assert failed.value.status == status


@pytest.mark.parametrize("path", ["/large", "/claims", "/bomb"])
async def test_what_is_too_large_is_refused_compressed_or_not(sites: Sites, path: str):
    with pytest.raises(FetchTooLarge):
        await fetch(sites.web, f"{sites.plain}{path}")


async def test_a_page_that_never_ends_is_too_large(sites: Sites):
    with pytest.raises(FetchTooLarge):
        await fetch(sites.web, f"{sites.endless}/")


async def test_a_server_that_says_nothing_is_a_timeout(sites: Sites):
    with pytest.raises(FetchTimeout):
        await fetch(sites.hasty, f"{sites.silent}/")


async def test_a_page_that_breaks_off_is_shown_with_a_warning(sites: Sites):
    view = await fetch(sites.web, f"{sites.plain}/short")
    assert view.text == "only this"
    assert view.warnings == ["the server broke off after 9 bytes: this is not all"]


async def test_a_name_that_does_not_exist_is_an_error_of_the_dns(sites: Sites):
    for scheme in ("http", "https"):
        with pytest.raises(FetchDns):
            await fetch(sites.web, f"{scheme}://nowhere.example/")


async def test_a_secure_site_is_read_if_its_certificate_is_right(sites: Sites):
    assert (await fetch(sites.web, f"{sites.secure}/")).text == "hello"
    sites.names["other.example"] = ["127.0.0.1"]
    with pytest.raises(FetchTls) as failed:
        await fetch(sites.web, f"{sites.secure}/".replace("secure.example", "other.example"))
    assert failed.value.reason == "its certificate is for another host"


async def test_a_plain_server_behind_https_is_an_error(sites: Sites):
    with pytest.raises(FetchError):
        await fetch(sites.hasty, f"{sites.plain}/".replace("http:", "https:"))


async def test_robots_txt_counts_if_the_operator_says_so(sites: Sites):
    assert (await fetch(sites.web, f"{sites.plain}/private")).text == "private"
    with pytest.raises(FetchRobots):
        await fetch(sites.polite, f"{sites.plain}/private")
    assert (await fetch(sites.polite, f"{sites.plain}/")).text == "hello"


async def test_a_page_is_downloaded_once_and_read_in_parts(sites: Sites):
    sites.seen.clear()
    first = await fetch(sites.web, f"{sites.plain}/long", max_chars=600)
    rest = await fetch(sites.web, f"{sites.plain}/long#part", max_chars=600, start_index=600)
    beyond = await fetch(sites.web, f"{sites.plain}/long", start_index=5000)
    assert (first.total_chars, first.next_start_index, first.cached) == (1000, 600, False)
    assert (rest.next_start_index, rest.cached, beyond.text) == (None, True, "")
    assert (first.text or "") + (rest.text or "") == SITE["/long"].body.decode()
    assert sites.seen == ["/long"]


async def test_owners_do_not_see_each_others_pages(sites: Sites):
    sites.seen.clear()
    for owner in ("ann", "bob"):
        view, _ = await sites.web.fetch(owner, FetchRequest(url=f"{sites.plain}/?own"))
        assert not view.cached
    assert sites.seen == ["/?own"] * 2


async def test_the_whole_download_comes_along_if_it_is_wanted(sites: Sites):
    view, data = await sites.web.fetch("ann", FetchRequest(url=f"{sites.plain}/odd", keep=True))
    assert (view.text, view.bytes, data) == ("Grüße", 5, "Grüße".encode("latin-1"))


async def test_a_server_that_imitates_the_bridge_only_harms_itself(sites: Sites):
    with pytest.raises(FetchRefused) as refused:
        await fetch(sites.web, f"{sites.plain}/imitation")
    assert refused.value.rule == "made-up"


@pytest.mark.parametrize(
    "url",
    ["ftp://site.example/", "site.example", "http://", "http://a:b@site.example/", "http://0x7f.1/", "http://[::1"],
)
async def test_what_is_no_address_is_a_bad_request(sites: Sites, url: str):
    with pytest.raises(BadRequest):
        await fetch(sites.web, url)
