"""Which network a sandbox gets, what it is told about it, and what operators see."""

from collections.abc import AsyncIterator
from ipaddress import ip_address

import anyio
import psutil
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import (
    BadRequest,
    DomainNotAllowed,
    NetworkNotEnabled,
    NetworkNotInTemplate,
    SandboxError,
)
from mcp_sandbox.operating.metrics import Metrics
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.networks import OFFLINE, Grant, Networks
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.next_steps import NEXT_STEPS
from mcp_sandbox.tools.run_text import run_blocks
from mcp_sandbox.views import with_next_step
from templates.catalogue import Catalogue
from templates.model import Template
from tests.unit.fakes import TEMPLATE, FakeProvider, finished
from tests.unit.test_views import RUN
from tests.web.sites import Page, head_of, pages, serving
from tests.web.world import NETWORKS, World, forget_proxies
from vmm.types import NetworkMode
from websearch.access import Access, Caller
from websearch.policy import Verdict
from websearch.quotas import Ledger, Quotas
from websearch.surroundings import surroundings

NONE, PROXY, NAT = NetworkMode
ME = "ada"


def settings_of(*domains: str, allow_nat: bool = False, **network: object) -> Settings:
    return Settings.model_validate({"network": {"allow_domains": domains, **network}, "allow_nat": allow_nat})


def template(most: NetworkMode = PROXY) -> Template:
    return Catalogue().load(TEMPLATE).model_copy(update={"network": most})


def refusal(settings: Settings, mode: NetworkMode, domains: list[str] | None = None, most: NetworkMode = PROXY) -> str:
    """Return what a model is told."""
    with pytest.raises(SandboxError) as error:
        Networks(settings).grant(template(most), mode, domains)
    return with_next_step(error.value, NEXT_STEPS)


def test_a_sandbox_is_offline_unless_it_asks_for_a_network():
    assert Networks(settings_of("*")).grant(template(), NONE) is OFFLINE


def test_a_template_allows_the_proxy_unless_it_says_otherwise():
    assert Catalogue().load(TEMPLATE).network is PROXY


def test_a_sandbox_gets_all_domains_of_the_operator_or_those_it_asks_for():
    networks = Networks(settings_of("pypi.org", "*.example.com"))
    assert networks.grant(template(), PROXY) == Grant(PROXY, ("pypi.org", "*.example.com"), None)
    asked = ["PyPI.org", "a.example.com", "*.b.example.com", "*.example.com"]
    granted = ("pypi.org", "a.example.com", "*.b.example.com", "*.example.com")
    assert networks.grant(template(), PROXY, asked) == Grant(PROXY, granted, granted)


def test_an_operator_who_allows_every_domain_allows_any_list():
    assert Networks(settings_of("*")).grant(template(), PROXY, ["anything.example"]).only == ("anything.example",)


@pytest.mark.parametrize("domain", ["evil.example", "pypi.org.evil.example", "*.pypi.org", "example.com", "*.com"])
def test_a_domain_outside_of_what_the_operator_allows_is_refused(domain: str):
    told = refusal(settings_of("pypi.org", "*.example.com"), PROXY, [domain])
    assert f"does not allow {domain!r}" in told
    assert "Allowed domains: pypi.org, *.example.com." in told
    assert "network.allow_domains" in told


@pytest.mark.parametrize("domain", ["*", "https://pypi.org", "a b", "-x.org"])
def test_a_domain_that_is_no_name_is_refused(domain: str):
    with pytest.raises(BadRequest, match="allow_domains"):
        Networks(settings_of("*")).grant(template(), PROXY, [domain])


def test_a_mode_that_the_operator_has_not_enabled_names_its_setting():
    assert "network.allow_domains" in refusal(settings_of(), PROXY)
    assert "allow_nat" in refusal(settings_of("*"), NAT, most=NAT)
    with pytest.raises(NetworkNotEnabled):
        Networks(settings_of()).grant(template(), PROXY)


def test_a_template_limits_the_mode():
    with pytest.raises(NetworkNotInTemplate) as error:
        Networks(settings_of("*")).grant(template(NONE), PROXY)
    assert error.value.fields == {"template": TEMPLATE, "mode": "proxy", "most": "none"}
    assert "template.toml" in refusal(settings_of("*", allow_nat=True), NAT)
    assert Networks(settings_of(allow_nat=True)).grant(template(NAT), NAT) == Grant(NAT)


@pytest.mark.parametrize("mode", [NONE, NAT])
def test_domains_need_the_proxy(mode: NetworkMode):
    with pytest.raises(BadRequest, match='network="proxy"'):
        Networks(settings_of("*", allow_nat=True)).grant(template(NAT), mode, ["pypi.org"])


def test_the_host_knows_its_own_addresses_and_its_own_proxy(monkeypatch: pytest.MonkeyPatch):
    forget_proxies(monkeypatch)
    monkeypatch.setenv("https_proxy", "http://user:pw@proxy.corp.example:3128")
    monkeypatch.setenv("no_proxy", "localhost")
    known = surroundings()
    assert ip_address("127.0.0.1") in known.own
    assert len(known.own) >= len([a for a in psutil.net_if_addrs()["lo"] if a.family.name == "AF_INET"])
    assert {str(authority) for authority in known.bridge} == {"proxy.corp.example:3128"}


# -- a service over machines in memory, with a real bridge ---------------------------------------------------


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    forget_proxies(monkeypatch)
    return World()


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def service(world: World, provider: FakeProvider) -> AsyncIterator[SandboxService]:
    async with world.site("plain.test", pages({"/": Page(b"plain page")})):
        settings = settings_of("plain.test", "other.test", ports=sorted(world.ports), private_networks=NETWORKS)
        networks = Networks(settings, world.accesses.append, world.resolve)
        with anyio.fail_after(60):
            async with SandboxService(provider, settings, networks=networks) as service:
                yield service


async def ask(provider: FakeProvider, host: str, port: int) -> str:
    """Open a stream as the newest machine would, ask for a page and return the first line of the answer."""
    serve = provider.agent.serve_stream
    assert serve is not None

    async def serve_one(stream: ByteStream) -> None:
        await serve(stream)

    async with serving(serve_one) as tunnel, await anyio.connect_tcp("127.0.0.1", tunnel) as stream:
        await stream.send(f"GET http://{host}:{port}/ HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        return (await head_of(stream)).decode().partition("\r\n")[0]


async def test_the_streams_of_a_sandbox_reach_what_it_may_and_are_recorded_with_its_owner(service, provider, world):
    box = await service.create(ME, network=PROXY)
    (port,) = world.ports
    assert await ask(provider, "plain.test", port) == "HTTP/1.1 200 OK"
    (access,) = world.accesses
    assert access.caller == Caller(ME, box.sandbox_id)
    assert (box.network, box.allow_domains) == ("proxy", ["plain.test", "other.test"])


async def test_a_machine_without_a_network_gets_no_function_that_serves_streams(service, provider):
    box = await service.create(ME)
    assert provider.agent.serve_stream is None
    assert (box.network, box.allow_domains) == ("none", [])
    await service.run(CodeRun(ME, "1"))
    assert provider.agent.serve_stream is None


async def test_a_run_says_what_was_refused_while_it_ran_and_no_other_run_does(service, provider, world):
    (port,) = world.ports
    box = await service.create(ME, network=PROXY, allow_domains=["other.test"])
    await ask(provider, "early.test", port)
    gate = anyio.Event()
    provider.agent.plans["fetch"] = [gate, finished()]
    runs = []

    async def run() -> None:
        runs.append(await service.run(CodeRun(ME, "fetch", box.sandbox_id)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        first = await ask(provider, "plain.test", port)
        await ask(provider, "plain.test", port)
        await ask(provider, "evil.test", port)
        gate.set()
    assert first.startswith("HTTP/1.1 403 refused by mcp-sandbox: domain-not-requested (plain.test is not among")
    assert runs[0].network_refusals == (
        f"plain.test:{port} (domain-not-requested): plain.test is not among the domains that were asked for; "
        "create a sandbox whose allow_domains include it",
        f"evil.test:{port} (domain-not-allowed): evil.test is not among the allowed domains; "
        "the operator's setting network.allow_domains decides",
    )
    assert (await service.run(CodeRun(ME, "1", box.sandbox_id))).network_refusals == ()


async def test_a_fork_and_a_pause_close_connections_and_say_so(service, provider, world):
    (port,) = world.ports
    box = await service.create(ME, network=PROXY, allow_domains=["plain.test"])
    assert box.closed_connections == 0
    provider.agent.open_streams = 2
    (copy,) = await service.fork(ME, box.sandbox_id, 1)
    assert (copy.network, copy.allow_domains, copy.closed_connections) == ("proxy", ["plain.test"], 2)
    assert await ask(provider, "plain.test", port) == "HTTP/1.1 200 OK"
    assert world.accesses[-1].caller.sandbox == copy.sandbox_id
    provider.agent.open_streams = 3
    paused = await service.pause(ME, copy.sandbox_id)
    assert (paused.closed_connections, paused.network) == (3, "proxy")
    resumed = await service.resume(ME, copy.sandbox_id)
    assert resumed.network == "proxy"
    assert await ask(provider, "plain.test", port) == "HTTP/1.1 200 OK"
    assert world.accesses[-1].caller.sandbox == copy.sandbox_id


async def test_the_sandboxes_of_an_owner_share_its_quotas(provider, world):
    settings = settings_of("*", requests_per_minute=1)
    async with SandboxService(provider, settings, networks=Networks(settings, resolver=world.resolve)) as service:
        for owner, status in ((ME, "502"), (ME, "429"), ("bob", "502")):
            await service.create(owner, network=PROXY)
            assert (await ask(provider, "nowhere.example", 80)).split()[1] == status


async def test_a_refused_network_starts_no_machine(service, provider):
    with pytest.raises(DomainNotAllowed):
        await service.create(ME, network=PROXY, allow_domains=["evil.test"])
    assert provider.agents == []


def test_a_result_shows_what_was_refused():
    shown = str(run_blocks(RUN.model_copy(update={"network_refusals": ("evil.test:443 (port): no",)}))[0])
    assert "network (refused by policy):\\n- evil.test:443 (port): no" in shown
    assert "network" not in str(run_blocks(RUN)[0])


def test_requests_are_counted_by_verdict_and_not_by_domain():
    metrics = Metrics(list)
    for verdict in (Verdict(True, "domain:a.test"), Verdict(True, "domain:b.test"), Verdict(False, "port", "no")):
        metrics.network_accessed(Access(Caller(ME, "sb-1"), Ledger(Quotas()), verdict=verdict, sent=3, received=5))
    text = metrics.text()
    assert 'mcp_sandbox_network_requests_total{rule="domain",verdict="allowed"} 2.0' in text
    assert 'mcp_sandbox_network_requests_total{rule="port",verdict="refused"} 1.0' in text
    assert 'mcp_sandbox_network_bytes_total{direction="received"} 15.0' in text
