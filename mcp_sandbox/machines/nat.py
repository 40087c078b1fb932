"""What machines in network mode `nat` may reach: the same as through the bridge of the web tools, as networks."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Network

from vmm.network.plan import NatConfig
from websearch.addresses import KINDS, METADATA

# Public resolvers that need no agreement. An operator may name others.
RESOLVERS = (IPv4Address("9.9.9.9"), IPv4Address("1.1.1.1"))


def nat_config(
    private_networks: Iterable[IPv4Network | IPv6Network] = (), resolvers: Iterable[IPv4Address] = RESOLVERS
) -> NatConfig:
    """Return the configuration of a host that allows `nat`. `private_networks` are those that the operator named."""
    return NatConfig(
        refused=tuple(network for _, network in KINDS if isinstance(network, IPv4Network)),
        never=tuple(sorted(IPv4Network(address) for address in METADATA if isinstance(address, IPv4Address))),
        allowed=tuple(network for network in private_networks if isinstance(network, IPv4Network)),
        resolvers=tuple(resolvers),
    )
