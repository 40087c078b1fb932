"""The two files called mcp-sandbox.toml: the user's own, and that of the working directory."""

import os
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import platformdirs

from mcp_sandbox.config.base import ConfigError
from mcp_sandbox.config.names import APP, suggestion, variable_of
from vmm.errors import Untrusted
from vmm.trust import read_trusted

CONFIG_NAME = "mcp-sandbox.toml"
# What the file in the working directory may set. An IDE starts the server in any repository its user opens, so a
# project may neither run code (home, guest_kernel, firecracker, template_path) nor weaken isolation or limits.
PROJECT_SETTINGS = frozenset({"template", "toolsets", "runs.timeout_s", "lifetime.idle_s"})


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


def file_values(path: Path, known: Collection[str], *, trusted: bool) -> dict[str, Any]:
    """Return the settings in a configuration file. Nobody but the user may have written a trusted one.

    Raises:
        ConfigError: it cannot be read, or sets what it may not.
    """
    try:
        if not path.is_file():
            return {}
        content = read_trusted(path) if trusted else path.read_bytes()
        values = tomllib.loads(content.decode())
    except Untrusted as error:
        raise ConfigError(str(error)) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for name in _dotted(values):
        if name not in known:
            raise ConfigError(f"{path}: unknown setting {name!r}{suggestion(name, known)}")
        if not trusted and name not in PROJECT_SETTINGS:
            raise ConfigError(
                f"{path}: a project may not set {name!r}, only {', '.join(sorted(PROJECT_SETTINGS))}. "
                f"Put it into {user_config_file()} or {variable_of(name)}."
            )
    return values


def _dotted(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name
