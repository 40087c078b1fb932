"""The search providers that an operator set up: where each one is, and how its key reaches it."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from websearch.authority import parse_authority
from websearch.secrets import Secret

ProviderName = Literal["searxng", "brave", "tavily", "exa", "google", "duckduckgo"]
NAMES: tuple[ProviderName, ...] = get_args(ProviderName)  # in the order in which they are asked by default

ENDPOINTS: Mapping[str, str] = {
    "brave": "https://api.search.brave.com/res/v1/web/search",
    "tavily": "https://api.tavily.com/search",
    "exa": "https://api.exa.ai/search",
    "google": "https://customsearch.googleapis.com/customsearch/v1",
    "duckduckgo": "https://html.duckduckgo.com/html/",
}
# Where a provider's requests carry its key.
KEY_HEADERS = {"brave": "x-subscription-token", "tavily": "authorization", "exa": "x-api-key"}
KEY_PARAMETERS = {"google": "key"}
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider that can be asked."""

    name: str
    endpoint: str
    engine_id: str = ""  # Google's cx
    secret: Secret | None = field(default=None)

    @property
    def fields(self) -> dict[str, Any]:
        """What a worker must know about it: never its key."""
        key = self.secret.placeholder if self.secret else ""
        return {"provider": self.name, "endpoint": self.endpoint, "engine_id": self.engine_id, "key": key}


def make_provider(name: str, *, endpoint: str | None = None, key: str | None = None, engine_id: str = "") -> Provider:
    """Return a provider; `endpoint` is its address if that is not the public one."""
    where = endpoint or ENDPOINTS[name]
    secret = None
    if key is not None:
        placeholder = f"key-{secrets.token_hex(16)}"
        place = {"header": KEY_HEADERS.get(name, ""), "parameter": KEY_PARAMETERS.get(name, "")}
        secret = Secret(placeholder, key, path=urlsplit(where).path, **place)
    return Provider(name, where, engine_id, secret)


def secrets_of(providers: Sequence[Provider]) -> dict[str, list[Secret]]:
    """Return the keys by the host that each belongs to, for the bridge."""
    found: dict[str, list[Secret]] = {}
    for provider in providers:
        if provider.secret is not None:
            found.setdefault(urlsplit(provider.endpoint).hostname or "", []).append(provider.secret)
    return found


def services_of(providers: Sequence[Provider]) -> frozenset[str]:
    """Return host:port of the operator's own search engine, which need not be at a public address."""
    own = (urlsplit(provider.endpoint) for provider in providers if provider.name == "searxng")
    return frozenset(str(parse_authority(url.netloc, PORTS[url.scheme])) for url in own)
