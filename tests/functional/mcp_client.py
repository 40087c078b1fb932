"""The real server as a process, and a client of it."""

import os
import sys
from typing import Any

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import CallToolResult, TextContent

from mcp_sandbox.config import variable_of
from tests.functional.checkout import REPO

SERVER = ("-m", "mcp_sandbox")


def server_environment(**settings: object) -> dict[str, str]:
    """The environment of a server of this process's home with these settings, such as `pool_max=0`."""
    return {**os.environ, **{variable_of(name): str(value) for name, value in settings.items()}}


def server_parameters(*options: str, temporary: str | None = None, **settings: object) -> StdioServerParameters:
    """How an MCP client starts a server with these command-line options and settings."""
    environment = server_environment(**settings) | ({"TMPDIR": temporary} if temporary else {})
    return StdioServerParameters(command=sys.executable, args=[*SERVER, *options], cwd=REPO, env=environment)


def connect_parameters(address: str) -> StdioServerParameters:
    """How an MCP client connects its stdio to a shared server."""
    return server_parameters("--connect", address)


def text_of(result: CallToolResult) -> str:
    """All text of an answer that is not an error."""
    assert not result.is_error, result.content
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


def error_of(result: CallToolResult) -> str:
    """The text of an answer that is an error."""
    assert result.is_error, result.content
    [block] = result.content
    assert isinstance(block, TextContent)
    return block.text


async def call(client: Client, tool: str, **arguments: object) -> CallToolResult:
    """Call a tool that has to succeed."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result


async def data_of(client: Client, tool: str, **arguments: object) -> dict[str, Any]:
    """The structured content that a tool answers with."""
    content: dict[str, Any] | None = (await call(client, tool, **arguments)).structured_content
    assert content is not None
    return content
