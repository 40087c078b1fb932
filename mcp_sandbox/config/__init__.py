"""The settings: one model, filled from flags, MCP_SANDBOX_* variables and two files called mcp-sandbox.toml.

The first source wins: flags, variables, the file in the working directory, the user's own file.

Settings that belong together form a group. A group is a table in the file (`[pool]`, `min = 2`) and a prefix of
environment variables (`MCP_SANDBOX_POOL_MIN=2`). Code that needs one group takes that group, not all settings.
"""

from mcp_sandbox.config.base import ConfigError, Group
from mcp_sandbox.config.files import CONFIG_NAME, PROJECT_SETTINGS, config_files, project_config_file, user_config_file
from mcp_sandbox.config.host_dirs import HostDir
from mcp_sandbox.config.limits import (
    FileSettings,
    LifetimeSettings,
    LimitSettings,
    OutputSettings,
    PoolSettings,
    RunSettings,
)
from mcp_sandbox.config.loading import load_settings
from mcp_sandbox.config.names import APP, ENV_PREFIX, variable_of
from mcp_sandbox.config.network import EVERY_DOMAIN, NetworkSettings
from mcp_sandbox.config.serve import LogSettings, OAuthSettings, ServeSettings
from mcp_sandbox.config.settings import AUTO, Settings, Toolset, setting_names
from mcp_sandbox.config.web import WebSettings

__all__ = [
    "APP",
    "AUTO",
    "CONFIG_NAME",
    "ENV_PREFIX",
    "EVERY_DOMAIN",
    "PROJECT_SETTINGS",
    "ConfigError",
    "FileSettings",
    "Group",
    "HostDir",
    "LifetimeSettings",
    "LimitSettings",
    "LogSettings",
    "NetworkSettings",
    "OAuthSettings",
    "OutputSettings",
    "PoolSettings",
    "RunSettings",
    "ServeSettings",
    "Settings",
    "Toolset",
    "WebSettings",
    "config_files",
    "load_settings",
    "project_config_file",
    "setting_names",
    "user_config_file",
    "variable_of",
]
