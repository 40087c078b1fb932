"""Says what kind of address an IP address is: a public one, or one that no sandbox may reach by default."""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

# Services of clouds that give credentials to any process that can reach them. Some are at public addresses.
METADATA = frozenset(
    ip_address(address)
    for address in (
        *("169.254.169.254", "169.254.169.253", "169.254.170.2", "169.254.170.23", "169.254.0.23"),
        *("100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe"),
    )
)

# The first network that contains an address decides.
KINDS: tuple[tuple[str, IPNetwork], ...] = tuple(
    (kind, ip_network(network))
    for kind, networks in (
        ("unspecified", ("0.0.0.0/8", "::/128")),
        ("loopback", ("127.0.0.0/8", "::1/128")),
        ("private", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
        ("cgnat", ("100.64.0.0/10",)),
        ("link-local", ("169.254.0.0/16", "fe80::/10")),
        ("documentation", ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")),
        ("benchmarking", ("198.18.0.0/15", "2001:2::/48")),
        ("multicast", ("224.0.0.0/4", "ff00::/8")),
        ("unique-local", ("fc00::/7",)),
        ("site-local", ("fec0::/10",)),
        ("reserved", ("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24")),
        ("reserved", ("240.0.0.0/4", "64:ff9b:1::/48", "100::/64", "5f00::/16", "2001:10::/28", "2001:20::/28")),
    )
    for network in networks
)
GLOBAL_V6 = IPv6Network("2000::/3")
NAT64 = IPv6Network("64:ff9b::/96")
IETF_V6 = IPv6Network("2001::/23")  # Teredo is in it; the rest is no place for a web server
MAPPED = IPv6Network("::ffff:0:0/96")
TRANSLATED = (NAT64, IPv6Network("::ffff:0:0:0/96"), IPv6Network("::/96"))  # the last 32 bits are an IPv4 address
ISATAP = (0x00005EFE, 0x02005EFE)  # bits 64 to 96 of an address whose last 32 bits are an IPv4 address


def kind_of(address: IPAddress) -> str | None:
    """Return why an address is not public, such as "loopback", or None if it is.

    An IPv6 address that carries an IPv4 address is as bad as that one: a router or the kernel may unpack it.
    """
    if address in METADATA:
        return "metadata"
    kind = next((kind for kind, network in KINDS if address.version == network.version and address in network), None)
    if kind is not None or isinstance(address, IPv4Address):
        return kind
    kind = next((kind for carried in embedded(address) if (kind := kind_of(carried))), None)
    if kind is not None:
        return kind
    if address in GLOBAL_V6 and (address not in IETF_V6 or address.teredo):
        return None
    return None if address in MAPPED or address in NAT64 else "reserved"


def forms_of(address: IPAddress) -> Iterator[IPAddress]:
    """Return an address and the IPv4 addresses that it carries: where a connection to it may end."""
    yield address
    if isinstance(address, IPv6Address):
        yield from embedded(address)


def embedded(address: IPv6Address) -> Iterator[IPv4Address]:
    """Return the IPv4 addresses that an IPv6 address carries: mapped, translated, 6to4, Teredo, ISATAP."""
    number = int(address)
    last = IPv4Address(number & 0xFFFFFFFF)
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif any(address in network for network in TRANSLATED) or number >> 32 & 0xFFFFFFFF in ISATAP:
        yield last
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
