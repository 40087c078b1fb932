"""Makes and removes the links of machines, with netlink. Everything here blocks, so it runs in worker threads.

A link does not outlive its machine: a veth ends with the machine's network namespace, a tap with its last descriptor.
"""

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

from pyroute2 import IPRoute, NetlinkError, netns

from vmm.network.plan import MACHINE_DEVICE, Link

OWN = "/proc/thread-self/ns/net"
TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI, IFF_TUN_EXCL = 0x0002, 0x1000, 0x8000
IFREQ = struct.Struct("16sH22x")
SYSCTLS = Path("/proc/sys/net")
# The host's end has no IPv6, and answers only for the address that it has itself.
HOST_END = {"ipv6/conf/{}/disable_ipv6": "1", "ipv4/conf/{}/arp_ignore": "1"}


@contextmanager
def in_namespace(file: str) -> Iterator[None]:
    """Run the block, which must not leave this thread, in another network namespace."""
    before, target = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC), -1
    try:
        target = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        netns.setns(target)
        try:
            yield
        finally:
            netns.setns(before)
    finally:
        os.close(before)
        if target >= 0:
            os.close(target)


def forwards(uplink: str) -> bool:
    """Return whether a namespace forwards packets between its devices."""
    with in_namespace(uplink):
        return (SYSCTLS / "ipv4/ip_forward").read_text().strip() == "1"


def routed_networks(uplink: str) -> list[IPv4Network]:
    """Return the networks that a namespace has routes to, but for the default route."""
    with in_namespace(uplink), IPRoute() as netlink:
        routes = [(route.get("dst"), route["dst_len"]) for route in netlink.get_routes(family=socket.AF_INET)]
    return [IPv4Network((address, bits)) for address, bits in routes if address]


def make_veth(uplink: str, links: Iterable[Link], machine: str, owner: str) -> tuple[Link, int]:
    """Connect two network namespaces with the first link whose name is free; return it and its index.

    The machine's end is ready. The host's end is down, and says in its alias whose it is.
    """
    target = os.open(machine, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with in_namespace(uplink), IPRoute() as netlink:
            for link in links:
                peer = {"ifname": MACHINE_DEVICE, "net_ns_fd": target}
                try:
                    netlink.link("add", ifname=link.name, kind="veth", peer=peer)
                except NetlinkError as error:
                    if error.code == errno.EEXIST:
                        continue
                    raise
                index = _describe(netlink, link, owner)
                break
            else:
                raise OSError(errno.EADDRNOTAVAIL, "all networks for links are in use")
    finally:
        os.close(target)
    with in_namespace(machine), IPRoute() as netlink:
        _raise_device(netlink, "lo")
        _raise_device(netlink, MACHINE_DEVICE, link.machine)
        netlink.route("add", dst="default", gateway=str(link.host.ip))
    return link, index


def make_tap(uplink: str, links: Iterable[Link], owner: str) -> tuple[Link, int, int]:
    """Create a tap device with the first name that is free; return its link, index and descriptor. It is down."""
    with in_namespace(uplink), IPRoute() as netlink:
        for link in links:
            device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
            try:
                request = IFREQ.pack(link.name.encode(), IFF_TAP | IFF_NO_PI | IFF_TUN_EXCL)
                fcntl.ioctl(device, TUNSETIFF, request)
                return link, _describe(netlink, link, owner), device
            except OSError as error:
                os.close(device)
                if error.errno not in (errno.EBUSY, errno.EEXIST):
                    raise
    raise OSError(errno.EADDRNOTAVAIL, "all networks for links are in use")


def open_link(uplink: str, link: Link) -> None:
    """Let packets through the host's end. The rules about them must be in force."""
    with in_namespace(uplink), IPRoute() as netlink:
        for file, value in HOST_END.items():
            path = SYSCTLS / file.format(link.name)
            if path.parent.exists():  # a kernel may have no IPv6
                path.write_text(value)
        _raise_device(netlink, link.name, link.host)


def remove_link(uplink: str, index: int) -> None:
    """Remove a link, unless it has ended with its machine."""
    with in_namespace(uplink), IPRoute() as netlink:
        try:
            netlink.link("del", index=index)
        except NetlinkError as error:
            if error.code != errno.ENODEV:
                raise


def _describe(netlink: IPRoute, link: Link, owner: str) -> int:
    (index,) = netlink.link_lookup(ifname=link.name)
    netlink.link("set", index=index, ifalias=owner)
    return int(index)


def _raise_device(netlink: IPRoute, name: str, address: IPv4Interface | None = None) -> None:
    (index,) = netlink.link_lookup(ifname=name)
    if address is not None:
        netlink.addr("add", index=index, address=str(address.ip), prefixlen=address.network.prefixlen)
    netlink.link("set", index=index, state="up")
