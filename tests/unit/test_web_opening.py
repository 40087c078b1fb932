"""The web tools put together as the server does it, with workers on this host."""

import ssl
from ipaddress import ip_network
from pathlib import Path

import pytest

from mcp_sandbox.config import ConfigError, WebSettings
from mcp_sandbox.web.opening import open_web
from tests.unit.test_web_providers import ANSWERS, ONE, ProviderServer
from tests.web.local_machine import LocalMachines
from tests.web.world import World, forget_proxies
from websearch import providers
from websearch.policy import Surroundings
from websearch.search import SearchRequest

pytestmark = pytest.mark.anyio


async def test_a_key_is_sent_to_servers_that_the_operators_authority_vouches_for(tmp_path: Path, monkeypatch):
    forget_proxies(monkeypatch)
    world, server = World(), ProviderServer(ANSWERS["brave"])
    authority = tmp_path / "authority.pem"
    authority.write_bytes(world.authority_pem)
    async with world.site("site.test", server, secure=True) as address:
        monkeypatch.setitem(providers.ENDPOINTS, "brave", f"{address}/search")
        settings = WebSettings(
            brave_key="s3cret",
            providers=("brave",),
            ports=tuple(world.ports),
            private_networks={"tests": ip_network("127.0.0.0/8")},
            ca_file=authority,
            cache_s=0,
        )
        async with open_web(settings, LocalMachines(), Surroundings, resolver=world.resolve) as web:
            with monkeypatch.context() as patch:
                patch.delattr(ssl, "create_default_context")  # it takes long, and was called once
                view = await web.search("ada", SearchRequest(query="snow"))
    assert [result.url for result in view.results] == [ONE["url"]]
    assert "s3cret" in server.heads[0]


async def test_a_file_without_certificates_is_an_error_of_the_settings(tmp_path: Path):
    authority = tmp_path / "authority.pem"
    authority.write_text("nonsense")
    settings = WebSettings(brave_key="s3cret", ca_file=authority)
    with pytest.raises(ConfigError, match=r"web\.ca_file"):
        async with open_web(settings, LocalMachines(), Surroundings):
            pass
