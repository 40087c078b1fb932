"""The MCP server: tools and resources over a SandboxService, and how it is served on stdio."""

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import anyio
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.stdio import stdio_server
from mcp_types import InputRequiredResult, Tool
from pydantic import AnyUrl

from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox import logs
from mcp_sandbox.app import Host, open_host, open_service
from mcp_sandbox.config import Settings
from mcp_sandbox.operating.metrics import enable_tracing
from mcp_sandbox.sandboxes.file_access import mime_of
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.lifetime import parent_gone, run_until_told
from mcp_sandbox.serving.schemas import lean
from mcp_sandbox.serving.stdio import LineReader, TextWriter, claimed_stdio, refusal
from mcp_sandbox.tools import code, commands, files, forks, handlers, sandboxes
from mcp_sandbox.tools.common import lifetime_of

LAST_ANSWERS_S = 0.5  # after the end of stdin, for answers on their way; then what still runs is cancelled


class SandboxServer(MCPServer[SandboxService]):
    """An MCP server whose resources have the type their name says; the SDK knows one type a template.

    Its tools are described without what a model reads for nothing.
    """

    async def list_tools(self) -> list[Tool]:
        """All tools, with lean schemas of their arguments."""
        tools = await super().list_tools()
        return [tool.model_copy(update={"input_schema": lean(tool.input_schema)}) for tool in tools]

    async def read_resource(
        self, uri: AnyUrl | str, context: Context[SandboxService, Any] | None = None
    ) -> Iterable[ReadResourceContents] | InputRequiredResult:
        """Read a file of a sandbox."""
        contents = await super().read_resource(uri, context)
        if isinstance(contents, InputRequiredResult):
            return contents
        return [replace(content, mime_type=mime_of(str(uri))) for content in contents]


def create_server(
    settings: Settings,
    isolation: str,
    open_service: Callable[[], AbstractAsyncContextManager[SandboxService]],
) -> SandboxServer:
    """The server, not yet connected to anything. The service lives as long as a connection's lifespan.

    `isolation` is what stands between sandboxes and this host, in words for a model.
    """

    @asynccontextmanager
    async def lifespan(_server: MCPServer[SandboxService]) -> AsyncIterator[SandboxService]:
        async with open_service() as service:
            yield service

    server = SandboxServer(
        "mcp-sandbox",
        title="Sandboxes for code",
        version=version("mcp-sandbox"),
        instructions=instructions(settings, isolation),
        lifespan=lifespan,
        log_level=settings.log.level,
    )
    for family in (sandboxes, code, commands, files, *([forks, handlers] if settings.toolset == "advanced" else [])):
        family.register(server, settings)
    return server


def instructions(settings: Settings, isolation: str) -> str:
    """What a client is told about the whole server."""
    return (
        f"Runs code in isolated sandboxes. Isolation level in force: {isolation}. "
        "Sandboxes are offline: they have no network device. "
        "create_sandbox gives a sandbox_id; files and, in Python, variables persist across calls that name it. "
        f"{lifetime_of(settings)}. run_code and run_command without sandbox_id keep nothing. "
        f"Code starts in {WORKSPACE}; files it leaves in {OUTPUTS} are artifacts to be read with read_artifact. "
        f"A run may take {settings.runs.timeout_s:g} s unless timeout_s says otherwise "
        f"(at most {settings.runs.max_timeout_s:g} s)."
    )


async def serve_stdio(
    opening: AbstractAsyncContextManager[SandboxServer], *, parent: int, max_message_bytes: int
) -> None:
    """Serve one client on stdin and stdout until it, a signal or the end of process `parent` says stop."""
    with claimed_stdio() as (wire_in, wire_out):
        writer = TextWriter(wire_out)

        async def refuse(start: bytes, end: bytes) -> None:
            await writer.write(refusal(start, end, max_message_bytes))

        reader = LineReader(wire_in, max_message_bytes, refuse)

        async def client_left() -> str:
            await reader.ended.wait()
            await anyio.sleep(LAST_ANSWERS_S)
            return "the client closed stdin"

        async def serve() -> None:
            # The SDK asks of its files only what these two have.
            streams = cast("anyio.AsyncFile[str]", reader), cast("anyio.AsyncFile[str]", writer)
            async with opening as server, stdio_server(*streams) as (incoming, outgoing):
                lowlevel = server._lowlevel_server  # noqa: SLF001 - MCPServer itself only offers threads
                await lowlevel.run(incoming, outgoing, lowlevel.create_initialization_options())

        await run_until_told(serve, client_left, lambda: parent_gone(parent))


@asynccontextmanager
async def open_server(settings: Settings) -> AsyncIterator[SandboxServer]:
    """A server over this host's sandboxes, which knows before the first client comes how they are isolated."""
    async with open_host(settings) as host:
        yield create_server(settings, _in_force(host), lambda: open_service(host, pooled=True))


def _in_force(host: Host) -> str:
    if host.facts is not None:
        return str(host.facts)
    verdict = host.choice.verdict
    fix = f" ({verdict.fix})" if verdict.fix else ""
    return f"none, because this host cannot start sandboxes: {verdict.reason}{fix}; then restart this server"


def run_stdio(settings: Settings) -> None:
    """Serve this host's sandboxes on stdio; returns when everything has ended."""
    logs.configure(settings.log.level, settings.log.format)
    if settings.tracing:
        enable_tracing()
    serve = partial(
        serve_stdio, open_server(settings), parent=os.getppid(), max_message_bytes=max_message_bytes(settings)
    )
    anyio.run(serve)


def max_message_bytes(settings: Settings) -> int:
    """How long a message may be: JSON and base64 make content longer than it is."""
    return 2 * (settings.files.max_write_bytes + settings.runs.max_code_bytes)
