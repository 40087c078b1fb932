"""What a machine in mode `nat` gets, decided without touching the host: a link, its addresses, and nftables rules."""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, collapse_addresses
from random import Random

# All links of machines, of any server, begin with this. Rules tell other machines by it.
LINK_PREFIX = "mcpnat"
# The range for tests of network devices: neither the internet nor, as a rule, a private network uses it.
LINKS = IPv4Network("198.18.0.0/15")
LINK_BITS = 30  # a network for each link: the host's end and the machine's
TRIES = 64  # far more than a host with a hundred machines needs
MAX_CONNECTIONS = 1024  # of a machine at a time: the kernel's table of connections belongs to the whole host
MACHINE_DEVICE = "eth0"
OWN_NETWORK = "/proc/self/ns/net"
# What the host answers instead of a refused packet: "communication administratively prohibited", so code fails at once.
REFUSE = "reject with icmpx admin-prohibited"


@dataclass(frozen=True, slots=True)
class NatConfig:
    """What machines in mode `nat` may reach. IPv6 is never forwarded."""

    refused: tuple[IPv4Network, ...]  # private networks and the like
    never: tuple[IPv4Network, ...] = ()  # refused even inside `allowed`: metadata services
    allowed: tuple[IPv4Network, ...] = ()  # private networks that the operator has named
    resolvers: tuple[IPv4Address, ...] = ()  # name servers that machines are told
    uplink: str = OWN_NETWORK  # the network namespace that leads to the internet


@dataclass(frozen=True, slots=True)
class Link:
    """One machine's link to its host."""

    number: int

    @property
    def name(self) -> str:
        """Return the name of the host's end. The kernel refuses a second one, so no two links have the same network."""
        return f"{LINK_PREFIX}{self.number:x}"

    @property
    def network(self) -> IPv4Network:
        first = int(LINKS.network_address) + (self.number << (32 - LINK_BITS))
        return IPv4Network((first, LINK_BITS))

    @property
    def host(self) -> IPv4Interface:
        """Return the address of the host's end, which is the machine's gateway."""
        return IPv4Interface((int(self.network.network_address) + 1, LINK_BITS))

    @property
    def machine(self) -> IPv4Interface:
        """Return the machine's address."""
        return IPv4Interface((int(self.network.network_address) + 2, LINK_BITS))


def candidates(routed: Iterable[IPv4Network], random: Random) -> list[Link]:
    """Return links to try one after the other, none of them in a network that the host has a route to."""
    taken = list(routed)
    numbers = random.sample(range(1 << (LINK_BITS - LINKS.prefixlen)), TRIES)
    links = [Link(number) for number in numbers]
    return [link for link in links if not any(link.network.overlaps(network) for network in taken)]


def ruleset(table: str, link: Link, config: NatConfig) -> str:
    """Return the nftables rules of one machine, for `nft -f`.

    All of them name the machine's link, so they apply to no other traffic of the host.
    """
    return f"""
table inet {table} {{
  {_set("never", config.never)}
  {_set("allowed", config.allowed)}
  {_set("refused", config.refused)}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname "{link.name}" {REFUSE}
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname "{link.name}" jump outbound
    oifname "{link.name}" ct state established,related accept
    oifname "{link.name}" {REFUSE}
  }}
  chain outbound {{
    meta nfproto != ipv4 drop
    ip saddr != {link.machine.ip} drop
    ct state invalid drop
    oifname "{LINK_PREFIX}*" {REFUSE}
    ip daddr @never {REFUSE}
    ip daddr @allowed jump counted
    ip daddr @refused {REFUSE}
    jump counted
  }}
  chain counted {{
    ct state new ct count over {MAX_CONNECTIONS} {REFUSE}
    accept
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {link.machine.ip} oifname != "{link.name}" masquerade
  }}
}}
"""


def _set(name: str, networks: Iterable[IPv4Network]) -> str:
    elements = ", ".join(map(str, collapse_addresses(networks)))
    listed = f"elements = {{ {elements} }}" if elements else ""
    return f"set {name} {{ type ipv4_addr; flags interval; {listed} }}"
