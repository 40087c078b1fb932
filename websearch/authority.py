"""Parses the host and port that a request names, strictly, into one canonical form.

Programs disagree about odd spellings of a host, such as `0177.1` or digits of another script. A check is
worth nothing if the program behind it reads the name differently, so a name has one spelling here or is refused.
"""

import re
import string
import unicodedata
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

import idna

IPAddress = IPv4Address | IPv6Address

MAX_NAME = 253  # characters, by the DNS
MAX_PORT = 65535
AUTHORITY = re.compile(r"(?P<host>\[[^\]]*\]|[^:@\[\]]+)(?::(?P<port>.*))?")
LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)  # what the last label of an IPv4 address can be, in any base


class BadAuthority(ValueError):
    """A host or port that is not accepted; `rule` names why."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Authority:
    """Where a request goes. `host` is an ASCII name in lower case, or an IP address as Python prints it."""

    host: str
    port: int
    address: IPAddress | None = None  # if the host is an address

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if isinstance(self.address, IPv6Address) else f"{self.host}:{self.port}"


def parse_authority(text: str, default_port: int | None = None) -> Authority:
    """Parse `host:port`, or `host` if there is a default port. Raises BadAuthority."""
    parts = AUTHORITY.fullmatch(text)
    if parts is None:
        raise BadAuthority("host-syntax", f"{_shown(text)} is not a host and a port")
    port = default_port if parts["port"] is None else _parse_port(parts["port"])
    if port is None:
        raise BadAuthority("host-syntax", f"the port is missing in {_shown(text)}")
    host, address = parse_host(parts["host"])
    return Authority(host, port, address)


def parse_host(text: str) -> tuple[str, IPAddress | None]:
    """Return a host in canonical form, and its address if it is one. Raises BadAuthority."""
    if text.startswith("["):
        address = _parse_ipv6(text)
        return str(address), address
    name = text if text.isascii() else _to_ascii(text)
    if _ends_in_a_number(name):
        if name != text:
            raise BadAuthority("ip-notation", f"{_shown(text)} is an address in unusual characters")
        address4 = _parse_ipv4(name)
        return str(address4), address4
    return normalise_name(name), None


def normalise_name(text: str) -> str:
    """Return a domain name in ASCII and lower case without a final dot. Raises BadAuthority."""
    name = (text if text.isascii() else _to_ascii(text)).lower().removesuffix(".")
    if len(name) > MAX_NAME or not all(LABEL.fullmatch(label) for label in name.split(".")):
        raise BadAuthority("host-syntax", f"{_shown(text)} is not a valid host name")
    for label in name.split("."):
        if label.startswith("xn--"):
            _check_punycode(label)
    return name


def _parse_port(digits: str) -> int:
    if not digits.isascii() or not digits.isdigit() or len(digits) > len(str(MAX_PORT)):
        raise BadAuthority("host-syntax", f"{_shown(digits)} is not a port")
    port = int(digits)
    if not 0 < port <= MAX_PORT:
        raise BadAuthority("host-syntax", f"{port} is not a port")
    return port


def _parse_ipv6(text: str) -> IPv6Address:
    inner = text[1:-1]
    if not text.endswith("]") or "%" in inner:
        raise BadAuthority("host-syntax", f"{_shown(text)} is not an IPv6 address without a zone")
    try:
        return IPv6Address(inner)
    except AddressValueError as error:
        raise BadAuthority("host-syntax", f"{_shown(text)} is not an IPv6 address") from error


def _parse_ipv4(text: str) -> IPv4Address:
    try:
        address = IPv4Address(text)  # four decimal numbers without leading zeros
    except AddressValueError as error:
        raise BadAuthority("ip-notation", f"{_shown(text)} is an unusual way to write an address") from error
    if str(address) != text:
        raise BadAuthority("ip-notation", f"{_shown(text)} is an unusual way to write an address")
    return address


def _ends_in_a_number(name: str) -> bool:
    """Return whether some program would take the name for an IPv4 address: browsers decide by the last label."""
    return NUMBER.fullmatch(name.removesuffix(".").rpartition(".")[2]) is not None


def _to_ascii(text: str) -> str:
    try:
        return idna.encode(text, uts46=True).decode("ascii")
    except idna.IDNAError as error:
        # idna refuses a name of digits only, but some programs normalise it to an address.
        plain = unicodedata.normalize("NFKC", text)
        if plain.isascii() and set(plain) <= set(string.hexdigits + "xX."):
            raise BadAuthority("ip-notation", f"{_shown(text)} is an address in unusual characters") from error
        raise BadAuthority("host-syntax", f"{_shown(text)} is not a valid host name") from error


def _check_punycode(label: str) -> None:
    try:
        idna.decode(label)
    except idna.IDNAError as error:
        raise BadAuthority("host-syntax", f"{_shown(label)} is not a valid internationalised name") from error


def _shown(text: str) -> str:
    """Return text of a guest for a message: short, and without control characters."""
    return ascii(text[:80])
