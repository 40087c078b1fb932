"""Which tools a server offers: whole toolsets or tools by name, and with `read_only` only those that change nothing."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.tools import Tool

from mcp_sandbox.config import Settings, Toolset
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.arguments import keep_text
from mcp_sandbox.tools import (
    code_tools,
    command_tools,
    fetch_tools,
    file_tools,
    fork_tools,
    handler_tools,
    host_tools,
    sandbox_tools,
    search_tools,
)

Register = Callable[[MCPServer[SandboxService], Settings], None]


def _register_web(server: MCPServer[SandboxService], settings: Settings) -> None:
    if settings.web_tools:
        search_tools.register(server, settings)
        fetch_tools.register(server, settings)


def _register_files(server: MCPServer[SandboxService], settings: Settings) -> None:
    file_tools.register(server, settings)
    host_tools.register(server, settings)


FAMILIES: dict[Toolset, Register] = {
    "code": code_tools.register,
    "commands": command_tools.register,
    "files": _register_files,
    "web": _register_web,
    "forks": fork_tools.register,
    "handlers": handler_tools.register,
}
GROUPS: dict[Toolset, tuple[Toolset, ...]] = {
    "default": ("sandboxes", "code", "commands", "files", "web"),
    "advanced": ("sandboxes", *FAMILIES),
}


@dataclass(eq=False)
class UnknownTool(SandboxError):
    """A setting names a tool that does not exist."""

    code = "unknown_tool"
    sentence = "There is no tool {name!r}{suggestion}."
    name: str
    suggestion: str


def add_tools(server: MCPServer[SandboxService], settings: Settings, isolation: str) -> None:
    """Add the tools that the settings ask for. `isolation` describes what separates sandboxes from this host.

    Raises:
        UnknownTool: they name one that does not exist.
    """
    wanted = {family for toolset in settings.toolsets for family in GROUPS.get(toolset, (toolset,))}
    families: dict[Toolset, Register] = {
        "sandboxes": partial(sandbox_tools.register, isolation=isolation),
        **FAMILIES,
    }
    for family, register in families.items():
        if settings.tools or family in wanted:
            register(server, settings)
    tools = _tools(server)
    for name in settings.tools:
        if name not in tools:
            close = difflib.get_close_matches(name, tools, n=1)
            raise UnknownTool(name, f"; did you mean {close[0]}?" if close else "")
    for name, tool in tools.items():
        keep_text(tool)
        if (settings.tools and name not in settings.tools) or (settings.read_only and not _reads_only(tool)):
            server.remove_tool(name)


def tool_names(server: MCPServer[SandboxService]) -> frozenset[str]:
    """Return the names of the tools that a server offers."""
    return frozenset(_tools(server))


def reading_tools(server: MCPServer[SandboxService]) -> frozenset[str]:
    """Return the names of the tools that change nothing."""
    return frozenset(name for name, tool in _tools(server).items() if _reads_only(tool))


def _reads_only(tool: Tool) -> bool:
    return tool.annotations is not None and bool(tool.annotations.read_only_hint)


def _tools(server: MCPServer[SandboxService]) -> dict[str, Tool]:
    return {tool.name: tool for tool in server._tool_manager.list_tools()}  # noqa: SLF001 - the public one is async
