"""Settings of sandboxes that have a network."""

from ipaddress import IPv4Address
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from mcp_sandbox.config.base import Addresses, Domains, Group, Networks, Ports, split
from websearch.policy import Policy, canonical_pattern
from websearch.quotas import Quotas

EVERY_DOMAIN = "*"  # in a list of domains
RESOLVERS = (IPv4Address("9.9.9.9"), IPv4Address("1.1.1.1"))  # public ones that need no agreement


def _allowed(text: str) -> str:
    return text if text == EVERY_DOMAIN else canonical_pattern(text)


AllowedDomains = Annotated[tuple[Annotated[str, AfterValidator(_allowed)], ...], BeforeValidator(split)]


class NetworkSettings(Group):
    """What sandboxes in network mode `proxy` may reach. The limits hold for each owner."""

    allow_domains: AllowedDomains = Field((), description="Domains that sandboxes may reach; *: every public one.")
    deny_domains: Domains = Field((), description="Domains that are refused even if they are allowed.")
    ports: Ports = Field((80, 443), description="Ports that sandboxes may connect to.")
    private_networks: Networks = Field({}, description="Networks that may be reached though not public, by name.")
    resolvers: Addresses = Field(RESOLVERS, description="Name servers of sandboxes in network mode nat.")
    require_sni: bool = Field(True, description="Refuse TLS connections that do not name their server.")
    allow_ech: bool = Field(False, description="Allow TLS connections that hide the name of their server.")
    connections: int = Field(32, ge=1, description="Open connections of one owner.")
    requests_per_minute: int = Field(300, ge=1, description="New requests of one owner.")
    names_per_minute: int = Field(60, ge=1, description="Names that one owner has not looked up before.")
    bytes_per_day: int = Field(4 << 30, ge=1, description="Bytes of one owner in both directions.")
    request_bytes: int = Field(32 << 20, ge=1, description="Bytes that one request may send.")
    response_bytes: int = Field(512 << 20, ge=1, description="Bytes that one request may receive.")
    time_s: float = Field(600, gt=0, description="Seconds that one request may take.")

    @property
    def enabled(self) -> bool:
        """Whether any sandbox may have the mode."""
        return bool(self.allow_domains)

    def policy(self, only: tuple[str, ...] | None = None) -> Policy:
        """Return the operator's policy, for a sandbox that asked for `only` these domains."""
        return Policy(
            ports=frozenset(self.ports),
            allow=None if EVERY_DOMAIN in self.allow_domains else self.allow_domains,
            only=only,
            deny=self.deny_domains,
            networks=self.private_networks,
            require_sni=self.require_sni,
            allow_ech=self.allow_ech,
        )

    def quotas(self) -> Quotas:
        """Return the limits on one request and on one owner."""
        return Quotas(**self.model_dump(include=set(Quotas.model_fields)))
