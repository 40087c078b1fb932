"""The web that a test makes: sites by name, the bridge that may reach them, and what it recorded."""

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from ipaddress import ip_address

import pytest
import trustme

from tests.web.sites import Site, serving, serving_tls
from websearch.access import Access
from websearch.addresses import IPAddress
from websearch.bridge import Bridge
from websearch.dial import NameUnknown
from websearch.policy import Policy, Surroundings
from websearch.quotas import Ledger, Quotas
from websearch.secrets import Secret

# The sites of tests are on loopback, which no sandbox may reach unless the operator names the network.
NETWORKS = {"tests": "127.0.0.0/8"}
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass
class World:
    """Names, ports and a certificate authority; and a bridge into this world."""

    ports: set[int] = field(default_factory=set)
    names: dict[str, list[str]] = field(default_factory=dict)
    lookups: list[str] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    quotas: Quotas = field(default_factory=Quotas)
    policy: dict[str, object] = field(default_factory=dict)
    secrets: dict[str, list[Secret]] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    surroundings: Surroundings | None = None

    @cached_property
    def authority(self) -> trustme.CA:
        """The authority that signs the sites' certificates. Clients have to be told to trust it."""
        return trustme.CA()

    @property
    def authority_pem(self) -> bytes:
        """The authority's certificate."""
        return self.authority.cert_pem.bytes()

    @asynccontextmanager
    async def site(self, name: str, site: Site, *, secure: bool = False) -> AsyncIterator[str]:
        """Serve a site under a name; yields its address without a slash at the end."""
        async with serving_tls(self.authority, name, site) if secure else serving(site) as port:
            self.names[name] = ["127.0.0.1"]
            self.ports.add(port)
            yield f"{'https' if secure else 'http'}://{name}:{port}"

    async def resolve(self, host: str) -> Sequence[IPAddress]:
        """Look a name up, as the bridge does. Only names of this world exist."""
        self.lookups.append(host)
        if host not in self.names:
            raise NameUnknown(f"the name {host} cannot be resolved")
        return [ip_address(address) for address in self.names[host]]

    def bridge(self) -> Bridge:
        """Return a bridge that may reach the sites."""
        return Bridge(
            Policy.model_validate({"ports": {80, 443} | self.ports, "networks": NETWORKS} | self.policy),
            Ledger(self.quotas),
            resolver=self.resolve,
            secrets=self.secrets,
            tls=self.tls,
            surroundings=self.surroundings,
            on_access=self.accesses.append,
        )

    def bridge_for(self, kind: str) -> Bridge:
        """Return the bridge for a kind of job: only searches may use the keys."""
        return self.bridge() if kind == "search" else replace(self, secrets={}).bridge()

    @property
    def rules(self) -> list[str]:
        """The rule of each verdict, in order."""
        return [access.verdict.rule for access in self.accesses]


def forget_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing go through a proxy of this host, which knows no site of a test."""
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
