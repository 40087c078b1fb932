"""The settings: one model, filled from flags, MCP_SANDBOX_* variables and two files called mcp-sandbox.toml.

The first source wins: flags, variables, the file in the working directory, the user's own file.

Settings that belong together form a group. A group is a table in the file (`[pool]`, `min = 2`) and a prefix of
environment variables (`MCP_SANDBOX_POOL_MIN=2`). Code that needs one group takes that group, not all settings.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import platformdirs
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from guest.protocol import MAX_COMMANDS
from templates.catalogue import Catalogue
from vmm.errors import Untrusted
from vmm.trust import read_trusted
from vmm.types import Isolation
from websearch.authority import parse_authority
from websearch.policy import Pattern, Policy, canonical_pattern
from websearch.providers import NAMES as PROVIDER_NAMES
from websearch.providers import ProviderName
from websearch.quotas import Quotas

APP = "mcp-sandbox"
CONFIG_NAME = "mcp-sandbox.toml"
ENV_PREFIX = "MCP_SANDBOX_"
# What the file in the working directory may set. An IDE starts the server in any repository its user opens, so a
# project may neither run code (home, guest_kernel, firecracker, template_path) nor weaken isolation or limits.
PROJECT_SETTINGS = frozenset({"template", "toolsets", "runs.timeout_s", "lifetime.idle_s"})
EVERY_DOMAIN = "*"  # in a list of domains
RESOLVERS = (IPv4Address("9.9.9.9"), IPv4Address("1.1.1.1"))  # public ones that need no agreement
Toolset = Literal["default", "advanced", "sandboxes", "code", "commands", "files", "web", "forks", "handlers"]
HOST_DIR_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
AUTO = "auto"  # for `driver` and `accel`: the best one that works on this host


class ConfigError(Exception):
    """A setting is unknown or has a bad value. The message names the setting and its source."""


class Group(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def _absolute_path(path: Path) -> Path:
    found = path.expanduser()
    if not found.is_absolute():
        raise ValueError(f"{path} is not an absolute path; only flags may have others")
    return found


class LimitSettings(Group):
    """How much may be in use at once."""

    sandboxes: int = Field(8, ge=1, le=1000, description="Live sandboxes, one-off runs included.")
    memory_mb: int | None = Field(None, ge=128, description="Memory that live sandboxes may take, with overhead.")
    owner_sandboxes: int | None = Field(None, ge=1, description="Live sandboxes of one owner.")
    owner_memory_mb: int | None = Field(None, ge=128, description="Memory that one owner's live sandboxes may take.")
    sandbox_memory_mb: int = Field(4096, ge=128, le=65_536, description="Most memory a client may give a sandbox.")
    sandbox_cpus: int | None = Field(None, ge=1, le=64, description="Most CPUs it may give one; default: the host's.")
    owner_runs: int | None = Field(None, ge=1, description="Active runs of one owner.")
    paused: int = Field(8, ge=0, le=1000, description="Paused sandboxes; their state is on disk.")
    owner_paused: int | None = Field(None, ge=0, description="Paused sandboxes of one owner.")
    restores: int = Field(4, ge=1, le=64, description="Machines being restored at the same time.")
    queue_timeout_s: float = Field(20, ge=0, description="Seconds a new sandbox waits for room within the limits.")


class PoolSettings(Group):
    """Machines kept ready before a client asks for them."""

    min: int = Field(1, ge=0, le=64, description="Machines kept ready per template.")
    max: int = Field(4, ge=0, le=64, description="Machines kept ready per template after a burst; 0 turns it off.")
    memory_mb: int = Field(5120, ge=0, description="Memory that pooled machines may take, with overhead.")
    max_age_s: float = Field(3600, gt=0, description="Age at which a pooled machine is replaced.")
    idle_s: float = Field(600, gt=0, description="Seconds after which a burst no longer counts.")


class LifetimeSettings(Group):
    """How long a sandbox lives."""

    idle_s: float = Field(900, gt=0, description="Seconds without use after which a sandbox ends.")
    max_idle_s: float = Field(3600, gt=0, description="Longest idle time a client may ask for.")
    max_age_s: float = Field(14_400, gt=0, description="Age at which every sandbox ends.")
    standstill_s: float = Field(
        5, ge=0, description="Seconds without use after which an idle machine uses no CPU; 0 turns it off."
    )

    @model_validator(mode="after")
    def _default_within_maximum(self) -> Self:
        if self.idle_s > self.max_idle_s:
            raise ValueError("idle_s is greater than max_idle_s")
        return self


class RunSettings(Group):
    """How long runs take and how many results are kept."""

    timeout_s: float = Field(30, gt=0, description="Time limit of a run unless the client sets one.")
    max_timeout_s: float = Field(600, gt=0, description="Longest time limit a client may set.")
    # Many clients give up on a call after 60 s and lose its result.
    foreground_s: float = Field(45, gt=0, description="Seconds after which a call leaves its run in the background.")
    max_code_bytes: int = Field(1 << 20, ge=1024, le=1 << 20, description="Longest code run_code takes.")
    concurrent: int = Field(8, ge=1, le=MAX_COMMANDS, description="Active runs of one sandbox.")
    kept: int = Field(16, ge=1, le=1000, description="Background results kept per sandbox.")
    kept_bytes: int = Field(8 << 20, ge=1024, description="Size of all kept results of a sandbox.")

    @model_validator(mode="after")
    def _default_within_maximum(self) -> Self:
        if self.timeout_s > self.max_timeout_s:
            raise ValueError("timeout_s is greater than max_timeout_s")
        return self


class OutputSettings(Group):
    """How much of a run's output a result shows.

    A result should stay near 10,000 tokens. Head and tail of both streams are 32 KiB, about 8,000 tokens.
    """

    head_bytes: int = Field(8192, ge=256, le=1 << 20, description="Start of an output stream shown in a result.")
    tail_bytes: int = Field(8192, ge=256, le=1 << 20, description="End of an output stream shown in a result.")
    page_bytes: int = Field(32_768, ge=1024, le=1 << 20, description="Most text one read returns.")
    # The guest sends this much of a stream as it comes, then only the end. The rest goes to a file in the sandbox.
    live_bytes: int = Field(512 << 10, ge=1024, le=16 << 20, description="Start of a stream sent while code runs.")
    images: int = Field(4, ge=0, le=32, description="Images shown in one result.")
    image_bytes: int = Field(2 << 20, ge=0, description="Size of all images shown in one result.")


class FileSettings(Group):
    """Files that clients read and write."""

    max_write_bytes: int = Field(16 << 20, ge=1024, description="Largest file write_file takes.")
    max_read_bytes: int = Field(16 << 20, ge=1024, description="Largest file returned as an image or a resource.")
    max_copy_bytes: int = Field(
        4 << 30, ge=1024, description="Largest file or archive that upload_file and download_file copy."
    )
    max_entries: int = Field(500, ge=1, le=10_000, description="Most entries in one listing.")


def _split(value: object) -> object:
    """Split an environment variable with a list of values."""
    return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


def _split_pairs(value: object) -> object:
    """Split an environment variable with a list of name=value."""
    return dict(pair.partition("=")[::2] for pair in value.split(",") if pair) if isinstance(value, str) else value


def _allowed(text: str) -> str:
    return text if text == EVERY_DOMAIN else canonical_pattern(text)


AllowedDomains = Annotated[tuple[Annotated[str, AfterValidator(_allowed)], ...], NoDecode, BeforeValidator(_split)]
Domains = Annotated[tuple[Pattern, ...], NoDecode, BeforeValidator(_split)]
Ports = Annotated[tuple[Annotated[int, Field(ge=1, le=65_535)], ...], NoDecode, BeforeValidator(_split)]
Addresses = Annotated[tuple[IPv4Address, ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[dict[str, IPv4Network | IPv6Network], NoDecode, BeforeValidator(_split_pairs)]


@dataclass(frozen=True, slots=True)
class HostDir:
    """A directory of the host that tools may copy files from and, if it is writable, to."""

    name: str  # what models call it; they never see the path
    path: Path
    writable: bool
    http: bool  # also for clients of `mcp-sandbox serve`

    @classmethod
    def parse(cls, text: object) -> "HostDir":
        """Read `NAME=PATH`, with the options `:rw` and `:http` at its end. Raises ValueError."""
        if not isinstance(text, str):
            raise ValueError("it must be a list of texts like data=/srv/data or out=/srv/out:rw")  # noqa: TRY004
        name, _, rest = text.strip().partition("=")
        path, *options = re.split(r":(?=(?:ro|rw|http)(?:$|:))", rest)
        if not HOST_DIR_NAME.fullmatch(name) or not path:
            raise ValueError(f"{text!r} is not like data=/srv/data or out=/srv/out:rw")
        return cls(name, _absolute_path(Path(path)), "rw" in options, "http" in options)

    def __str__(self) -> str:
        return f"{self.name}={self.path}{':rw' * self.writable}{':http' * self.http}"


HostDirs = Annotated[
    tuple[Annotated[HostDir, BeforeValidator(HostDir.parse), PlainSerializer(str)], ...],
    NoDecode,
    BeforeValidator(_split),
]


class WebSettings(Group):
    """How the web tools reach the web. Keys are never shown, logged or sent into a machine."""

    providers: Annotated[tuple[ProviderName, ...] | None, NoDecode] = Field(
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

    @model_validator(mode="before")
    @classmethod
    def _without_web_tools(cls, values: object) -> object:
        """Drop `tools`: the variable of the setting `web_tools` reads like that of a field of this group."""
        return (
            {name: value for name, value in values.items() if name != "tools"} if isinstance(values, dict) else values
        )

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
        return None if path is None else _absolute_path(path)

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


_NEEDS: dict[ProviderName, str] = {
    "searxng": "searxng_url",
    "brave": "brave_key",
    "tavily": "tavily_key",
    "exa": "exa_key",
    "google": "google_key",
}


class ServeSettings(Group):
    """The HTTP server of `mcp-sandbox serve`."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Names under which clients may reach the server, with port unless it is the usual one."
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Web pages that may call the server, as https://name."
    )
    require_token: bool = Field(False, description="Do not start without a token, on loopback either.")
    certificate: Path | None = Field(None, description="TLS certificate chain, PEM.")
    key: Path | None = Field(None, description="Private key of the certificate, PEM.")
    requests_per_minute: int = Field(600, ge=1, description="Requests of one token, unless the token says otherwise.")
    drain_s: float = Field(30, ge=0, description="Seconds that active runs get when the server stops.")
    audit: Literal["file", "stderr", "off"] = Field("file", description="Where to log who did what.")
    trusted_proxies: Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode] = Field(
        (), description="Addresses of reverse proxies whose X-Forwarded-For counts in the audit log."
    )

    @field_validator("allowed_hosts", "allowed_origins", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @field_validator("certificate", "key", mode="after")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else _absolute_path(path)

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


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
    )

    home: Path = Field(
        default_factory=lambda: platformdirs.user_data_path(APP),
        description="Directory of images, snapshots and running machines.",
    )
    driver: str = Field(AUTO, description="How machines run: auto, or a driver's name.")
    min_isolation: Isolation = Field(Isolation.NAMESPACE, description="Refuse drivers that isolate less.")
    accel: Literal["auto", "kvm", "tcg"] = Field("auto", description="How a virtual machine's CPU runs.")
    guest_kernel: Path | None = Field(None, description="Guest kernel to use instead of Debian's.")
    guest_modules: Path | None = Field(None, description="Modules directory of that kernel.")
    firecracker: Path | None = Field(None, description="Firecracker's program, if it is not on the PATH.")
    cloud_hypervisor: Path | None = Field(None, description="Cloud Hypervisor's program, if it is not on the PATH.")
    runsc: Path | None = Field(None, description="gVisor's program, instead of the one that setup or the PATH has.")
    template: str = Field("python-data-analysis", description="Default template.")
    template_path: Annotated[tuple[Path, ...], NoDecode] = Field(
        default_factory=lambda: (platformdirs.user_config_path(APP) / "templates",),
        description="Directories of custom templates, searched before the built-in ones.",
    )
    toolsets: Annotated[tuple[Toolset, ...], NoDecode] = Field(
        ("default",), min_length=1, description="Groups of tools offered to clients; advanced has all."
    )
    web_tools: bool = Field(True, description="Offer web_search and fetch_url.")
    allow_nat: bool = Field(False, description="Let sandboxes have a network device behind the host's address.")
    host_dirs: HostDirs = Field(
        (), description="Directories of the host that upload_file and download_file may use: NAME=PATH[:rw][:http]."
    )
    tools: Annotated[tuple[str, ...], NoDecode] = Field((), description="The only tools offered, instead of toolsets.")
    read_only: bool = Field(False, description="Offer only tools that change nothing.")
    connect: str | None = Field(
        None,
        description="Address of a shared server: stdin and stdout are connected to it instead of to a server here.",
    )
    token: str | None = Field(None, repr=False, description="Token for that server.")
    tracing: bool = Field(False, description="Emit OpenTelemetry spans if opentelemetry-api is installed.")

    limits: LimitSettings = LimitSettings()
    pool: PoolSettings = PoolSettings()
    lifetime: LifetimeSettings = LifetimeSettings()
    runs: RunSettings = RunSettings()
    output: OutputSettings = OutputSettings()
    files: FileSettings = FileSettings()
    web: WebSettings = WebSettings()
    network: NetworkSettings = NetworkSettings()
    log: LogSettings = LogSettings()
    serve: ServeSettings = ServeSettings()
    oauth: OAuthSettings = OAuthSettings()

    @field_validator("home", "guest_kernel", "guest_modules", "firecracker", "cloud_hypervisor", "runsc", mode="after")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        """Refuse paths that depend on the working directory, which may be a stranger's repository."""
        return None if path is None else _absolute_path(path)

    @model_validator(mode="after")
    def _host_dirs_are_apart(self) -> Self:
        """Refuse names that are used twice, and access to our own files: tokens, snapshots, what machines run."""
        names = [folder.name for folder in self.host_dirs]
        if len(set(names)) < len(names):
            raise ValueError("host_dirs uses a name twice")
        home = self.home.resolve()
        for folder in self.host_dirs:
            path = folder.path.resolve()
            if path.is_relative_to(home) or home.is_relative_to(path):
                raise ValueError(f"host_dirs: {folder.path} contains the server's home or is in it")
        return self

    @field_validator("template_path", mode="after")
    @classmethod
    def _all_absolute(cls, path: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(map(_absolute_path, path))

    @field_validator("template_path", mode="before")
    @classmethod
    def _split_path(cls, value: object) -> object:
        """Split the environment variable, which lists directories as PATH does."""
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

    @field_validator("toolsets", "tools", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        """Split a flag or an environment variable, which separates names by commas."""
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @property
    def catalogue(self) -> Catalogue:
        """All templates, built-in and custom."""
        return Catalogue(self.template_path)

    @property
    def binaries(self) -> dict[str, Path | None]:
        """Programs that the operator chose, by driver."""
        return {"firecracker": self.firecracker, "cloud-hypervisor": self.cloud_hypervisor, "gvisor": self.runsc}

    @property
    def run_dir(self) -> Path:
        """Scratch directory of running machines."""
        return self.home / "run"

    @property
    def cache_dir(self) -> Path:
        """Probe verdicts about this host."""
        return self.home / "cache"

    def changed(self, values: Mapping[str, object]) -> Self:
        """Return a copy with other values for settings such as `driver` or `pool.min`."""
        update: dict[str, Any] = {}
        for name, value in values.items():
            group, _, field = name.partition(".")
            if field:
                update[group] = update.get(group, getattr(self, group)).model_copy(update={field: value})
            else:
                update[name] = value
        return self.model_copy(update=update)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - passed by name
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - passed by name
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Prefer flags to environment variables, those to the project's file, and that to the user's file."""
        project = _TomlFile(settings_cls, project_config_file(), trusted=False)
        return init_settings, env_settings, project, _TomlFile(settings_cls, user_config_file(), trusted=True)


class _TomlFile(PydanticBaseSettingsSource):
    """The values of one configuration file."""

    def __init__(self, settings_cls: type[BaseSettings], path: Path, *, trusted: bool) -> None:
        super().__init__(settings_cls)
        self._path = path
        self._trusted = trusted

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        return None, field_name, False  # `__call__` returns all values at once

    def __call__(self) -> dict[str, Any]:
        try:
            if not self._path.is_file():
                return {}
            content = read_trusted(self._path) if self._trusted else self._path.read_bytes()
            values = tomllib.loads(content.decode())
        except Untrusted as error:
            raise ConfigError(str(error)) from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{self._path}: {error}") from error
        known = dict(setting_names())
        for name in _dotted(values):
            if name not in known:
                raise ConfigError(f"{self._path}: unknown setting {name!r}{_suggestion(name, known)}")
            if not self._trusted and name not in PROJECT_SETTINGS:
                raise ConfigError(
                    f"{self._path}: a project may not set {name!r}, only {', '.join(sorted(PROJECT_SETTINGS))}. "
                    f"Put it into {user_config_file()}, a flag or {variable_of(name)}."
                )
        return values


def setting_names() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting as `name` or `group.name`, with its field."""
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            yield from ((f"{name}.{inner}", info) for inner, info in field.annotation.model_fields.items())
        else:
            yield name, field


def variable_of(setting: str) -> str:
    """Return the environment variable of a setting such as `pool.min`."""
    return f"{ENV_PREFIX}{setting.replace('.', '_').upper()}"


def project_config_file() -> Path:
    """Return the configuration file of the working directory, which may be a stranger's repository."""
    return Path.cwd() / CONFIG_NAME


def user_config_file() -> Path:
    """Return the user's own configuration file."""
    path = platformdirs.user_config_path(APP) / CONFIG_NAME
    if not path.is_absolute():  # it would be a file of the working directory
        raise ConfigError(f"XDG_CONFIG_HOME is not an absolute path: {os.environ.get('XDG_CONFIG_HOME')}")
    return path


def config_files() -> list[Path]:
    """Return the configuration files that exist, most important first."""
    return [path for path in (project_config_file(), user_config_file()) if path.is_file()]


def load_settings(**flags: Any) -> Settings:  # noqa: ANN401 - pydantic checks them
    """Read the settings from all sources. A flag that is None was not given.

    Raises:
        ConfigError: a setting is unknown or has a bad value.
    """
    _check_variables()
    try:
        return Settings(**{key: _from_here(value) for key, value in flags.items() if value is not None})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        sources = ", ".join(["a flag", f"{ENV_PREFIX}*", *map(str, config_files())])
        raise ConfigError(f"bad setting: {problems} (set by one of: {sources})") from error


def _from_here(flag: Any) -> Any:  # noqa: ANN401 - pydantic checks it
    """Return a flag with its paths below the working directory: a user who types a relative one means that."""
    if isinstance(flag, Path):
        return flag.expanduser().absolute()
    return tuple(map(_from_here, flag)) if isinstance(flag, tuple) else flag


def _check_variables() -> None:
    """Refuse misspelled variables: a limit that is silently not in force is worse than an error."""
    known = [variable_of(name) for name, _ in setting_names()]
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"unknown environment variable {name}{_suggestion(name, known)}")


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _dotted(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name
