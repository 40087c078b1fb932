"""What machines in network mode `nat` may reach: the same as through the bridge of the web tools, as networks."""

from ipaddress import IPv4Address, IPv4Network

from mcp_sandbox.config import Settings
from vmm.network.plan import NatConfig
from websearch.addresses import KINDS, METADATA


def nat_config(settings: Settings) -> NatConfig | None:
    """Return what the settings allow; None if they do not allow `nat`."""
    if not settings.allow_nat:
        return None
    return NatConfig(
        refused=tuple(network for _, network in KINDS if isinstance(network, IPv4Network)),
        never=tuple(sorted(IPv4Network(address) for address in METADATA if isinstance(address, IPv4Address))),
        allowed=tuple(net for net in settings.network.private_networks.values() if isinstance(net, IPv4Network)),
        resolvers=settings.network.resolvers,
    )
