"""Where each client keeps its MCP servers, and what it wants to know about one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs

Entry = dict[str, Any]


def _plain(command: str, args: list[str]) -> Entry:
    return {"command": command, "args": args}


def _typed(command: str, args: list[str]) -> Entry:
    return {"type": "stdio", "command": command, "args": args}


@dataclass(frozen=True, slots=True)
class Client:
    """A program that uses MCP servers."""

    title: str
    file: Callable[[], Path]  # of the user, for all projects
    table: str  # where servers are in it, by name
    entry: Callable[[str, list[str]], Entry] = _plain
    syntax: Literal["json", "toml"] = "json"
    then: str = "Restart it."


def _home(*parts: str) -> Callable[[], Path]:
    return lambda: Path.home().joinpath(*parts)


def _config(*parts: str) -> Callable[[], Path]:
    return lambda: platformdirs.user_config_path().joinpath(*parts)


CLIENTS: Mapping[str, Client] = {
    "claude-code": Client("Claude Code", _home(".claude.json"), "mcpServers", _typed, then="/mcp shows it."),
    "claude-desktop": Client("Claude Desktop", _config("Claude", "claude_desktop_config.json"), "mcpServers"),
    "vscode": Client(
        "VS Code", _config("Code", "User", "mcp.json"), "servers", _typed, then="It asks before it starts it."
    ),
    "cursor": Client("Cursor", _home(".cursor", "mcp.json"), "mcpServers", then="Enable it in its MCP settings."),
    "zed": Client("Zed", _config("zed", "settings.json"), "context_servers", then="The agent panel lists it."),
    "codex": Client("Codex", _home(".codex", "config.toml"), "mcp_servers", syntax="toml", then="/mcp shows it."),
}
