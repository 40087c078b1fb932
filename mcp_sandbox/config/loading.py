"""Read the settings for a command line, and explain what is wrong with them."""

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mcp_sandbox.config.base import ConfigError
from mcp_sandbox.config.files import config_files
from mcp_sandbox.config.names import ENV_PREFIX, suggestion, variable_of
from mcp_sandbox.config.settings import Settings, setting_names


def load_settings(**flags: Any) -> Settings:  # noqa: ANN401 - pydantic checks them
    """Read the settings from all sources. A flag that is None was not given.

    Raises:
        ConfigError: a setting is unknown or has a bad value.
    """
    _check_variables()
    try:
        return Settings(**{key: _from_here(value) for key, value in flags.items() if value is not None})
    except ValidationError as error:
        problems = "; ".join(": ".join(filter(None, (_place(p["loc"]), p["msg"]))) for p in error.errors())
        sources = ", ".join(["a flag", f"{ENV_PREFIX}*", *map(str, config_files())])
        raise ConfigError(f"bad setting: {problems} (set by one of: {sources})") from error


def _place(location: tuple[int | str, ...]) -> str:
    """Return the setting that an error is about. Pydantic also names its own validators there."""
    return ".".join(str(part) for part in location if "[" not in str(part))


def _from_here(flag: Any) -> Any:  # noqa: ANN401 - pydantic checks it
    """Return a flag with its paths below the working directory: a user who types a relative one means that."""
    if isinstance(flag, Path):
        return flag.expanduser().absolute()
    return tuple(map(_from_here, flag)) if isinstance(flag, tuple) else flag


def _check_variables() -> None:
    """Refuse misspelled variables: a limit that is silently not in force is worse than an error."""
    known = [variable_of(name) for name, _ in setting_names()]
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"unknown environment variable {name}{suggestion(name.upper(), known)}")
