"""Network mode `nat`: what is decided without touching the host, and what the host must have."""

import os
import random
import subprocess
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from mcp_sandbox.app import Drivers
from mcp_sandbox.config import Settings
from tests.nat_world import RESOLVER, config_of
from vmm.driver import DRIVERS
from vmm.errors import NetworkUnsupported
from vmm.hierarchy import pid_namespace
from vmm.network import links, nat, tables
from vmm.network.nat import Nat, nat_trouble
from vmm.network.plan import LINKS, Link, candidates, ruleset
from vmm.process import find_tool
from websearch.addresses import KINDS, METADATA, kind_of

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network devices")
WITH_NFT = pytest.mark.skipif(find_tool("nft") is None, reason="nftables is not installed")


def test_each_link_has_a_network_of_its_own():
    every = [Link(0), Link(1), Link((1 << 15) - 1)]
    assert [str(link.network) for link in every] == ["198.18.0.0/30", "198.18.0.4/30", "198.19.255.252/30"]
    assert [str(link.machine) for link in every] == ["198.18.0.2/30", "198.18.0.6/30", "198.19.255.254/30"]
    assert [str(link.host.ip) for link in every] == ["198.18.0.1", "198.18.0.5", "198.19.255.253"]
    assert max(len(link.name) for link in every) <= 15  # the kernel's limit


def test_no_link_is_in_a_network_that_the_host_has_a_route_to():
    lower_half = IPv4Network("198.18.0.0/16")
    found = candidates([IPv4Network("10.0.0.0/8"), lower_half], random.Random(1))
    assert found
    assert all(link.network.subnet_of(LINKS) and not link.network.overlaps(lower_half) for link in found)
    assert candidates([LINKS], random.Random(1)) == []


def test_the_refused_networks_are_those_of_the_bridge():
    config = config_of("10.9.0.0/16")
    every = [network for _, network in KINDS if isinstance(network, IPv4Network)]
    samples = [address for network in every for address in (network.network_address, network.broadcast_address)]
    samples += [address for address in METADATA if isinstance(address, IPv4Address)]
    samples += [IPv4Address(address) for address in ("8.8.8.8", "11.0.0.0", "9.255.255.255", "172.32.0.0", "223.9.9.9")]
    for address in samples:
        refused = any(address in network for network in (*config.refused, *config.never))
        assert refused == (kind_of(address) is not None), address
    assert config.allowed == (IPv4Network("10.9.0.0/16"),)


@AS_ROOT
@WITH_NFT
def test_the_kernel_takes_the_rules_and_they_name_no_other_device(tmp_path: Path):
    link = Link(7)
    file = tmp_path / "rules"
    file.write_text(ruleset("mcp-sandbox-1-2-3-home-machine", link, config_of()))
    argv = ["unshare", "--net", "sh", "-c", f"nft -f {file} && nft list ruleset"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    for hook in ("input", "forward", "postrouting"):
        (rules,) = (part for part in listed.split("chain ") if part.startswith(f"{hook} {{"))
        lines = [line.strip() for line in rules.splitlines()[2:] if line.strip() not in ("", "}")]
        assert lines
        assert all(f'"{link.name}"' in line for line in lines)
    assert "policy drop" not in listed


async def test_a_host_whose_operator_did_not_allow_it_refuses(tmp_path: Path):
    with pytest.raises(NetworkUnsupported, match="allow_nat = true"):
        async with Nat(None, tmp_path).tap("machine"):
            pass


def test_what_a_host_lacks_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in (nat_trouble() or "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(nat, "_capabilities", lambda: 0)
    assert "CAP_NET_ADMIN" in (nat_trouble() or "")
    monkeypatch.setattr(nat, "_capabilities", lambda: nat.CAP_NET_ADMIN)
    monkeypatch.setattr(nat, "find_tool", lambda _: None)
    assert "apt-get install nftables" in (nat_trouble() or "")
    monkeypatch.setattr(nat, "find_tool", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(links, "forwards", lambda _: False)
    assert "sysctl -w net.ipv4.ip_forward=1" in (nat_trouble() or "")
    monkeypatch.setattr(links, "forwards", lambda _: True)
    assert nat_trouble() is None


def test_only_tables_of_dead_servers_of_this_pid_namespace_are_removed():
    mine = f"table inet {tables.table_name('home', 'machine')}"
    dead = f"table inet mcp-sandbox-1-1-{pid_namespace()}-home-machine"
    elsewhere = "table inet mcp-sandbox-1-1-1-home-machine"
    strangers = ["table inet filter", "table ip mcp-sandbox-1-1-1-x", "table inet mcp-sandbox", "nonsense"]
    assert [tables._dead(line) for line in (mine, elsewhere, *strangers)] == [None] * 6
    assert tables._dead(dead) == dead.split()[2]


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("name", DRIVERS)
async def test_a_driver_is_told_about_nat_only_if_the_operator_allows_it(tmp_path: Path, name: str, allowed: bool):
    settings = Settings.model_validate({"home": tmp_path, "allow_nat": allowed, "network": {"resolvers": [RESOLVER]}})
    async with Drivers(settings) as drivers:
        config = drivers.load(name)._config  # type: ignore[attr-defined]
    assert (config.nat == config_of()) is allowed
    assert (config.nat is None) is not allowed
