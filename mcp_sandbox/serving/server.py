"""The MCP server: tools and resources over a SandboxService."""

import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.shared.inbound import X_MCP_HEADER_KEY
from mcp_types import CallToolResult, InputRequiredResult, Tool
from pydantic import AnyUrl, ValidationError

from mcp_sandbox.accounts.audit import audited
from mcp_sandbox.accounts.owners import TokenReadOnly, may_change
from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.argument_errors import invalid_arguments, unknown_argument, unknown_tool
from mcp_sandbox.serving.arguments import lean, plain
from mcp_sandbox.serving.initialize import INSTRUCTIONS, NAME, TITLE
from mcp_sandbox.serving.tasks import RunTasks, check_listener
from mcp_sandbox.serving.toolsets import add_tools, reading_tools, tool_names
from mcp_sandbox.tools.common import tool_errors
from mcp_sandbox.views import mime_of


class SandboxServer(MCPServer[SandboxService]):
    """An MCP server with short schemas, errors for unknown arguments, and resources typed by their file name."""

    _schemas: dict[str, dict[str, Any]] | None = None  # of each tool's arguments

    def _tool_input_schema(self, name: str) -> dict[str, Any] | None:
        """Return a tool's schema if clients repeat arguments in headers. The SDK searches it in every call."""
        return super()._tool_input_schema(name) if name in self._with_headers else None

    @cached_property
    def _with_headers(self) -> frozenset[str]:
        tools = self._tool_manager.list_tools()
        return frozenset(tool.name for tool in tools if X_MCP_HEADER_KEY in json.dumps(tool.parameters))

    async def list_tools(self) -> list[Tool]:
        """Return the tools that the caller may use, with short schemas of their arguments.

        Schemas of results would be more than half of the list, and some clients show all of it to the model. Results
        say themselves what they have, and docs/tools.md describes them.
        """
        tools = await super().list_tools()
        if not may_change():
            reading = reading_tools(self)
            tools = [tool for tool in tools if tool.name in reading]
        return [
            tool.model_copy(update={"input_schema": lean(plain(tool.input_schema)), "output_schema": None})
            for tool in tools
        ]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[SandboxService, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool, and log who did it."""
        with audited("mcp", name if name in tool_names(self) else "unknown tool") as entry:
            entry.about(arguments.get("sandbox_id"), arguments.get("run_id"))
            result = await self._call_tool(name, arguments, context)
            if isinstance(result, CallToolResult):
                for view in (result.structured_content, *(result.meta or {}).values()):
                    if isinstance(view, dict):
                        entry.about(view.get("sandbox_id"), view.get("run_id"))
        return result

    async def _call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[SandboxService, Any] | None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool, and keep errors short for models.

        The SDK ignores unknown arguments; a model that misspells one must learn about it. It also puts "Error
        executing tool …" before every error, and pydantic's whole report after wrong arguments.
        """
        if self._schemas is None:
            tools = await super().list_tools()
            self._schemas = {tool.name: plain(tool.input_schema) for tool in tools}
        if name not in self._schemas:
            raise ToolError(unknown_tool(name, self._schemas))
        schema = self._schemas[name]
        if not (may_change() or name in reading_tools(self)):
            with tool_errors():
                raise TokenReadOnly
        problem = unknown_argument(name, arguments, tuple(schema["properties"]))
        if problem is not None:
            raise ToolError(problem)
        try:
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError:
            raise
        except ToolError as error:
            if isinstance(error.__cause__, ValidationError):
                raise ToolError(invalid_arguments(name, error.__cause__, schema)) from error
            if isinstance(error.__cause__, ToolError):
                raise error.__cause__ from error.__cause__.__cause__
            raise

    async def read_resource(
        self, uri: AnyUrl | str, context: Context[SandboxService, Any] | None = None
    ) -> Iterable[ReadResourceContents] | InputRequiredResult:
        """Read a file of a sandbox. The SDK knows only one MIME type for all of them."""
        with audited("mcp", "read_resource") as entry:
            entry.about(urlsplit(str(uri)).netloc)
            contents = await super().read_resource(uri, context)
        if isinstance(contents, InputRequiredResult):
            return contents
        return [replace(content, mime_type=mime_of(str(uri))) for content in contents]


def create_server(
    settings: Settings,
    isolation: str,
    open_service: Callable[[], AbstractAsyncContextManager[SandboxService]],
) -> SandboxServer:
    """Return a server that is not connected yet. `open_service` runs for as long as a connection lasts.

    `isolation` describes to a model what separates sandboxes from this host.

    Raises:
        UnknownTool: the settings name a tool that does not exist.
    """

    @asynccontextmanager
    async def lifespan(_server: MCPServer[SandboxService]) -> AsyncIterator[SandboxService]:
        async with open_service() as service:
            yield service

    server = SandboxServer(
        NAME,
        title=TITLE,
        version=version(NAME),
        instructions=INSTRUCTIONS,
        lifespan=lifespan,
        log_level=settings.log.level,
        extensions=[RunTasks()],
        middleware=[check_listener],
    )
    add_tools(server, settings, isolation)
    return server
