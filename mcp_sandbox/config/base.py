"""What all groups of settings share: their base class, and types of values that environment variables list."""

from ipaddress import IPv4Address, IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from websearch.policy import Pattern


class ConfigError(Exception):
    """A setting is unknown or has a bad value. The message names the setting and its source."""


class Group(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def absolute_path(path: Path) -> Path:
    """Refuse paths that depend on the working directory, which may be a stranger's repository."""
    found = path.expanduser()
    if not found.is_absolute():
        raise ValueError(f"{path} is not an absolute path: give one that starts with /")
    return found


def split(value: object) -> object:
    """Split an environment variable with a list of values."""
    return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


def split_pairs(value: object) -> object:
    """Split an environment variable with a list of name=value."""
    pairs = split(value)
    return dict(pair.partition("=")[::2] for pair in pairs) if isinstance(pairs, tuple) else pairs


Domains = Annotated[tuple[Pattern, ...], BeforeValidator(split)]
Ports = Annotated[tuple[Annotated[int, Field(ge=1, le=65_535)], ...], BeforeValidator(split)]
Addresses = Annotated[tuple[IPv4Address, ...], BeforeValidator(split)]
Networks = Annotated[dict[str, IPv4Network | IPv6Network], BeforeValidator(split_pairs)]
