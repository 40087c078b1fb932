"""Tools that copy files between sandboxes and the host: offered if the operator opened directories of it."""

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from pydantic import Field

from guest.places import WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.host_copies import HostCopies
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import SandboxId, ToolContext, hints, owner_of, service_of, tool_errors
from mcp_sandbox.views import CopiedFile

FOLDERS = "a directory becomes one tar archive"


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add the tools that can do anything here."""
    if settings.host_dirs:
        _register_upload(mcp, settings)
    if any(folder.writable for folder in settings.host_dirs):
        _register_download(mcp, settings)


def _register_upload(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    names = [folder.name for folder in settings.host_dirs]

    @mcp.tool(
        title="Upload file",
        description=f"Copy a file of the host into a sandbox; {FOLDERS}. Directories of the host: {', '.join(names)}.",
        annotations=hints(read_only=False, destructive=True, idempotent=True),
    )
    async def upload_file(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        source: Annotated[
            str, Field(min_length=1, max_length=4095, description=f"On the host, such as {names[0]}/file.csv.")
        ],
        path: Annotated[
            str | None,
            Field(min_length=1, max_length=4095, description=f"In the sandbox; default: the same name in {WORKSPACE}."),
        ] = None,
    ) -> CopiedFile:
        with tool_errors():
            return await _copies(ctx, settings, sandbox_id).upload(source, path)


def _register_download(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    names = [folder.name for folder in settings.host_dirs if folder.writable]

    @mcp.tool(
        title="Download file",
        description=f"Copy a file of a sandbox to the host; {FOLDERS}. Directories of the host: {', '.join(names)}.",
        annotations=hints(read_only=False, destructive=True, idempotent=True),
    )
    async def download_file(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: Annotated[str, Field(min_length=1, max_length=4095, description="In the sandbox.")],
        target: Annotated[
            str, Field(min_length=1, max_length=4095, description=f"On the host, such as {names[0]}/file.csv.")
        ],
        overwrite: Annotated[bool, Field(description="Replace a file that exists.")] = False,
    ) -> CopiedFile:
        with tool_errors():
            return await _copies(ctx, settings, sandbox_id).download(path, target, overwrite=overwrite)


def _copies(ctx: ToolContext, settings: Settings, sandbox_id: str) -> HostCopies:
    async def report(copied: int) -> None:
        await ctx.report_progress(copied, None, f"{copied:,} bytes copied")

    return HostCopies(service_of(ctx), settings.host_dirs, owner_of(ctx), sandbox_id, report)
