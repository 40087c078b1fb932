"""Settings of the web tools."""

import re
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from mcp_sandbox.config.base import ConfigError, Domains, Group, Networks, Ports, absolute_path
from websearch.authority import parse_authority
from websearch.policy import Policy
from websearch.providers import NAMES as PROVIDER_NAMES
from websearch.providers import ProviderName
from websearch.quotas import Quotas

_NEEDS: dict[ProviderName, str] = {
    "searxng": "searxng_url",
    "brave": "brave_key",
    "tavily": "tavily_key",
    "exa": "exa_key",
    "google": "google_key",
}


class WebSettings(Group):
    """How the web tools reach the web. Keys are never shown, logged or sent into a machine."""

    providers: tuple[ProviderName, ...] | None = Field(
        None, description="Search providers in the order in which they are asked; default: all that are set up."
    )
    merge: bool = Field(False, description="Ask all providers at once and merge what they find.")
    searxng_url: str | None = Field(None, description="Address of a SearXNG or searx instance with JSON enabled.")
    brave_key: SecretStr | None = Field(None, description="API key for Brave Search.")
    tavily_key: SecretStr | None = Field(None, description="API key for Tavily.")
    exa_key: SecretStr | None = Field(None, description="API key for Exa.")
    google_key: SecretStr | None = Field(None, description="API key for Google Programmable Search.")
    google_cx: str | None = Field(None, description="Id of the Google Programmable Search engine.")
    cache_s: float = Field(300, ge=0, description="Seconds for which a search or page is answered from memory.")
    max_bytes: int = Field(16 << 20, ge=1024, le=64 << 20, description="Largest download of fetch_url.")
    artifact_bytes: int = Field(32 << 20, ge=0, description="Bytes kept for one owner that fit into no answer.")
    artifact_s: float = Field(3600, ge=0, description="Seconds for which they are kept.")
    timeout_s: float = Field(30, gt=0, le=600, description="Time limit of fetch_url for a page.")
    respect_robots: bool = Field(False, description="Do not fetch what the robots.txt of a site forbids.")
    ca_file: Path | None = Field(None, description="More certificate authorities to trust, PEM.")
    deny_domains: Domains = Field((), description="Domains that the web tools do not reach.")
    ports: Ports = Field((80, 443), description="Ports that the web tools may connect to.")
    private_networks: Networks = Field({}, description="Networks that may be reached though not public, by name.")
    connections: int = Field(32, ge=1, description="Open connections of one owner.")
    requests_per_minute: int = Field(300, ge=1, description="New requests of one owner.")
    names_per_minute: int = Field(60, ge=1, description="Names that one owner has not looked up before.")
    bytes_per_day: int = Field(4 << 30, ge=1, description="Bytes of one owner in both directions.")
    idle_s: float = Field(300, gt=0, description="Seconds without use after which the machine for the web stops.")
    max_requests: int = Field(500, ge=1, description="Requests after which that machine is replaced.")
    max_age_s: float = Field(3600, gt=0, description="Age at which that machine is replaced.")

    @field_validator("providers", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        """Split the environment variable."""
        return tuple(filter(None, re.split(r"[\s,:]+", value))) if isinstance(value, str) else value

    @field_validator("providers", mode="after")
    @classmethod
    def _each_once(cls, names: tuple[ProviderName, ...] | None) -> tuple[ProviderName, ...] | None:
        if names is not None and len(set(names)) < len(names):
            raise ValueError("a provider is named twice")
        return names

    @field_validator("searxng_url", mode="after")
    @classmethod
    def _plain_address(cls, url: str | None) -> str | None:
        """Refuse an address with a password: addresses are logged and sent into a machine."""
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("it must be like https://searx.example.org")
        if "@" in parts.netloc:
            raise ValueError("it must not contain a user name or password")
        parse_authority(parts.netloc, 443)  # as the bridge reads it
        return url.rstrip("/")

    @model_validator(mode="after")
    def _google_is_complete(self) -> Self:
        if (self.google_key is None) != (self.google_cx is None):
            raise ValueError("google_key and google_cx belong together")
        return self

    @model_validator(mode="after")
    def _named_ones_are_set_up(self) -> Self:
        missing = [name for name in self.providers or () if not self.is_set_up(name)]
        if missing:
            raise ValueError(f"providers names {missing[0]}, but {_NEEDS[missing[0]]} is not set")
        return self

    @field_validator("ca_file", mode="after")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else absolute_path(path)

    def certificates(self) -> str | None:
        """Return the certificates in `ca_file`. Raises ConfigError."""
        try:
            return None if self.ca_file is None else self.ca_file.read_text("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"web.ca_file cannot be read: {error}") from error

    def policy(self) -> Policy:
        """Return what the web tools may reach."""
        return Policy(ports=frozenset(self.ports), deny=self.deny_domains, networks=self.private_networks)

    def quotas(self) -> Quotas:
        """Return the limits on one request and on one owner: a response may be twice the largest download."""
        return Quotas(response_bytes=2 * self.max_bytes, **self.model_dump(include=set(Quotas.model_fields)))

    def is_set_up(self, provider: ProviderName) -> bool:
        """Return whether a provider can be asked."""
        return provider == "duckduckgo" or getattr(self, _NEEDS[provider]) is not None

    @property
    def search_providers(self) -> tuple[ProviderName, ...]:
        """The providers to ask, in order."""
        return tuple(filter(self.is_set_up, PROVIDER_NAMES)) if self.providers is None else self.providers
