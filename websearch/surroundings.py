"""What this host knows about itself, and no guest may reach: its addresses, and where its own proxy listens."""

from contextlib import suppress
from ipaddress import ip_address
from itertools import chain
from urllib.request import getproxies_environment

import psutil

from websearch import dial
from websearch.addresses import IPAddress
from websearch.authority import Authority, BadAuthority
from websearch.policy import Surroundings


def surroundings() -> Surroundings:
    """Return what this host knows now. It takes a millisecond."""
    return Surroundings(own=_own_addresses(), bridge=_own_proxies())


def _own_addresses() -> frozenset[IPAddress]:
    found = set()
    for address in chain.from_iterable(psutil.net_if_addrs().values()):
        with suppress(ValueError):  # of another family, such as a MAC address
            found.add(ip_address(address.address.partition("%")[0]))
    return frozenset(found)


def _own_proxies() -> frozenset[Authority]:
    found = set()
    for name, url in getproxies_environment().items():
        with suppress(BadAuthority):
            if name != "no":
                found.add(dial.parse_upstream(url).authority)
    return frozenset(found)
