"""Decides which connections a sandbox may make: a pure function of a policy, a request and addresses.

Every verdict names its rule. The bridge asks once it knows the host's addresses and connects only to those, so a name
server cannot answer differently the second time. A redirect is a new request of the guest, and is decided anew.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from websearch.addresses import IPAddress, forms_of, kind_of
from websearch.authority import Authority, BadAuthority, normalise_name
from websearch.client_hello import ClientHello

WILDCARD = "*."
# Names that only mean something inside a network, or to programs on the host.
INTERNAL = frozenset(
    ("localhost", "local", "localdomain", "internal", "intranet", "lan", "home", "corp", "private", "arpa", "onion")
)
MAX_LABEL = 48  # characters; longer labels carry data
MAX_LABELS = 8
RANDOM_LABEL = 24  # characters from which a label is checked for random text
MIN_VOWELS = 6  # one in so many characters: words have more
MAX_SWITCHES = 4  # between letters and digits: names have few, encoded data has many


def canonical_pattern(text: str) -> str:
    """Return a domain pattern in canonical form: a name, or `*.` and a name."""
    wildcard = WILDCARD if text.startswith(WILDCARD) else ""
    try:
        return wildcard + normalise_name(text.removeprefix(WILDCARD))
    except BadAuthority as error:
        raise ValueError(f"{error}; a domain is example.com, or *.example.com for the names below it") from error


Pattern = Annotated[str, AfterValidator(canonical_pattern)]


class Policy(BaseModel):
    """What may be reached. Everything that is not public is refused unless a network of the operator contains it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ports: frozenset[int] = frozenset({80, 443})
    allow: tuple[Pattern, ...] | None = None  # None: every domain that is not denied
    only: tuple[Pattern, ...] | None = None  # what a caller has asked for; it narrows `allow` and widens nothing
    deny: tuple[Pattern, ...] = ()
    networks: dict[str, IPv4Network | IPv6Network] = {}  # by a name of the operator's: allowed though not public
    services: frozenset[str] = frozenset()  # host:port of what the operator set up: allowed wherever it is
    require_sni: bool = True  # a TLS connection without a server name could go to any site at that address
    allow_ech: bool = False  # an encrypted ClientHello hides the server name


@dataclass(frozen=True, slots=True)
class Request:
    """What a guest asks for."""

    authority: Authority
    kind: Literal["tunnel", "http"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision and the rule it comes from."""

    allowed: bool
    rule: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the host knows about itself, and no sandbox may reach."""

    own: Collection[IPAddress] = field(default=frozenset())  # the host's addresses
    bridge: Collection[Authority] = field(default=frozenset())  # where a proxy of ours, or the host's own, listens


def refused(rule: str, reason: str) -> Verdict:
    """Return a refusal."""
    return Verdict(False, rule, reason)


def decide(
    policy: Policy, request: Request, addresses: Sequence[IPAddress], surroundings: Surroundings | None = None
) -> Verdict:
    """Decide about a request whose host has these addresses. One bad address refuses all of them."""
    surroundings = surroundings or Surroundings()
    name = decide_name(policy, request, surroundings)
    if not name.allowed:
        return name
    target = request.authority
    if not addresses:
        return refused("no-address", f"{target.host} has no address")
    rule = name.rule
    if _is_service(policy, target) and not any(kind_of(address) == "metadata" for address in addresses):
        return name
    for address in addresses:
        verdict = _decide_address(policy, target.host, address, surroundings)
        if not verdict.allowed:
            return verdict
        rule = verdict.rule or rule
    return Verdict(True, rule)


def decide_name(policy: Policy, request: Request, surroundings: Surroundings | None = None) -> Verdict:
    """Decide about what is known before a name is looked up: looking it up could already carry data out."""
    target = request.authority
    if surroundings is not None and target in surroundings.bridge:
        return refused("bridge", f"{target} is the proxy itself")
    if _is_service(policy, target):
        return Verdict(True, "service")
    if target.port not in policy.ports:
        ports = ", ".join(map(str, sorted(policy.ports)))
        return refused("port", f"port {target.port} is not allowed; allowed: {ports}")
    if target.address is not None:
        return _decide_literal(policy, target)
    return _decide_domain(policy, target.host)


def decide_tls(policy: Policy, host: str, hello: ClientHello | None) -> Verdict:
    """Decide about a tunnel once its first bytes are known; None if they are not TLS."""
    if hello is None:
        return refused("tls-missing", "only TLS may go through a tunnel")
    if hello.encrypted and not policy.allow_ech:
        return refused("tls-ech", "an encrypted ClientHello hides the server name")
    if hello.server_name is None:
        if policy.require_sni:
            return refused("tls-no-sni", "the ClientHello names no server")
        return Verdict(True, "tls-no-sni-allowed")
    try:
        named = normalise_name(hello.server_name)
    except BadAuthority:
        named = None
    if named != host:
        return refused("tls-sni-mismatch", f"the ClientHello names another server than {host}")
    return Verdict(True, "tls")


def matching(patterns: Sequence[str], host: str) -> str | None:
    """Return the pattern that a canonical host name matches; an exact one comes first."""
    if host in patterns:
        return host
    return next((p for p in patterns if p.startswith(WILDCARD) and host.endswith(p[1:])), None)


def within(pattern: str, allowed: Sequence[str]) -> bool:
    """Return whether everything that a pattern matches is matched by one of the allowed ones, too."""
    name = pattern.removeprefix(WILDCARD)
    if pattern == name:
        return matching(allowed, name) is not None
    return pattern in allowed or any(p.startswith(WILDCARD) and name.endswith(p[1:]) for p in allowed)


def carries_data(host: str) -> bool:
    """Return whether a name looks like data on its way out through the DNS: long, many or random labels."""
    labels = host.split(".")
    return len(labels) > MAX_LABELS or any(len(label) > MAX_LABEL or _is_random(label) for label in labels)


def _is_random(label: str) -> bool:
    if len(label) < RANDOM_LABEL or label.startswith("xn--"):
        return False
    switches = len(re.findall(r"[a-z](?=[0-9])|[0-9](?=[a-z])", label))
    vowels = len(re.findall(r"[aeiouy]", label))
    return switches > MAX_SWITCHES or ("-" not in label and vowels * MIN_VOWELS < len(label))


def _decide_domain(policy: Policy, host: str) -> Verdict:
    if pattern := matching(policy.deny, host):
        return refused("domain-denied", f"{host} is denied by {pattern}")
    allowed = matching(policy.allow or (), host)
    if policy.allow is not None and not allowed:
        return refused("domain-not-allowed", f"{host} is not among the allowed domains")
    if policy.only is not None and not matching(policy.only, host):
        return refused("domain-not-requested", f"{host} is not among the domains that were asked for")
    if allowed == host:  # the operator named exactly this host
        return Verdict(True, f"domain:{allowed}")
    if "." not in host or host.rpartition(".")[2] in INTERNAL:
        return refused("host-internal", f"{host} is a name of a private network")
    if carries_data(host):
        return refused("dns-label", f"{host[:80]} looks like data rather than a name")
    return Verdict(True, f"domain:{allowed}" if allowed else "public")


def _decide_literal(policy: Policy, target: Authority) -> Verdict:
    if target.host in policy.deny:
        return refused("domain-denied", f"{target.host} is denied")
    if policy.allow is not None and target.host not in policy.allow and not _network_of(policy, target.address):
        return refused("domain-not-allowed", f"{target.host} is not among the allowed domains")
    if policy.only is not None and target.host not in policy.only:
        return refused("domain-not-requested", f"{target.host} is not among the domains that were asked for")
    return Verdict(True, "public")


def _decide_address(policy: Policy, host: str, address: IPAddress, surroundings: Surroundings) -> Verdict:
    """Return a verdict whose rule is empty if nothing special holds for the address."""
    kind = kind_of(address)
    network = _network_of(policy, address)
    if network and kind != "metadata":
        return Verdict(True, f"network:{network}")
    if kind:
        return refused(f"address-{kind}", f"{host} is at {address}, which is not public ({kind})")
    if any(form in surroundings.own for form in forms_of(address)):
        return refused("address-host", f"{host} is at {address}, which is this host")
    return Verdict(True, "")


def _is_service(policy: Policy, target: Authority) -> bool:
    return str(target) in policy.services


def _network_of(policy: Policy, address: IPAddress | None) -> str | None:
    if address is None:
        return None
    return next(
        (name for name, net in policy.networks.items() if net.version == address.version and address in net), None
    )
