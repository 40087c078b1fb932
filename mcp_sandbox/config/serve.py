"""Settings of the server: how it listens, whom it believes, and what it logs."""

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from mcp_sandbox.config.base import Group, absolute_path, split


class ServeSettings(Group):
    """The HTTP server of `mcp-sandbox serve`."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    allowed_hosts: tuple[str, ...] = Field(
        (), description="Names under which clients may reach the server, with port unless it is the usual one."
    )
    allowed_origins: tuple[str, ...] = Field((), description="Web pages that may call the server, as https://name.")
    require_token: bool = Field(False, description="Do not start without a token, on loopback either.")
    certificate: Path | None = Field(None, description="TLS certificate chain, PEM.")
    key: Path | None = Field(None, description="Private key of the certificate, PEM.")
    requests_per_minute: int = Field(600, ge=1, description="Requests of one token, unless the token says otherwise.")
    drain_s: float = Field(30, ge=0, description="Seconds that active runs get when the server stops.")
    audit: Literal["file", "stderr", "off"] = Field("file", description="Where to log who did what.")
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = Field(
        (), description="Addresses of reverse proxies whose X-Forwarded-For counts in the audit log."
    )

    @field_validator("allowed_hosts", "allowed_origins", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split(value)

    @field_validator("certificate", "key", mode="after")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else absolute_path(path)

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS needs both certificate and key")
        return self


def _plain_url(url: str | None) -> str | None:
    """Refuse an address that others could read along, or that has more than a host and a path."""
    if url is None:
        return None
    parts = urlsplit(url)
    if not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("it must be like https://login.example.com")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")):
        raise ValueError("it must begin with https://, except on this host")
    return url


class OAuthSettings(Group):
    """An OAuth issuer whose users may use `mcp-sandbox serve`."""

    issuer: str | None = Field(None, description="The issuer of access tokens, exactly as they name it.")
    resource: str | None = Field(None, description="Address under which clients reach this server: https://name/mcp.")
    audience: str | None = Field(None, min_length=1, description="Whom tokens must be for; default: the resource.")
    jwks_url: str | None = Field(None, description="Where the issuer's keys are; default: as its metadata say.")
    scope_prefix: str = Field("", description="What the issuer puts before the scopes read, use and operate.")
    leeway_s: float = Field(30, ge=0, le=300, description="Seconds that the issuer's clock may be off.")

    _plain = field_validator("issuer", "resource", "jwks_url", mode="after")(_plain_url)

    @model_validator(mode="after")
    def _issuer_and_resource(self) -> Self:
        if (self.issuer is None) != (self.resource is None):
            raise ValueError("issuer and resource belong together")
        return self


class LogSettings(Group):
    """What the server logs on stderr."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("WARNING", description="Least severe level logged.")
    format: Literal["text", "json"] = Field("text", description="Plain lines, or one JSON object per line.")
