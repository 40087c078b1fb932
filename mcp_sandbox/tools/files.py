"""Tools that move files in and out of a sandbox, and the resources that serve them whole."""

import base64
import binascii
from typing import Annotated, Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp_types import CallToolResult
from pydantic import Field
from pydantic.fields import FieldInfo

from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest, FileError, SandboxError, SandboxNotFound
from mcp_sandbox.sandboxes.file_access import resolve
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.common import SandboxId, ToolContext, hints, owner_of, service_of, tool_errors
from mcp_sandbox.tools.next_steps import NEXT_STEPS
from mcp_sandbox.tools.reading import decoded, read_blocks
from mcp_sandbox.views import ArtifactList, FileList, WrittenFile, with_next_step

WorkspacePath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=4095,
        description=f"Path in the sandbox; a relative one starts at {WORKSPACE}.",
    ),
]
ArtifactPath = Annotated[
    str,
    Field(min_length=1, max_length=4095, description=f"Path of an artifact; a relative one starts at {OUTPUTS}."),
]
Offset = Annotated[int, Field(ge=0, description="Byte of the file to start at.")]


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add this family's tools."""
    limit = Field(ge=1, le=settings.output.page_bytes, description="Most bytes of text to return.")
    _register_workspace(mcp, settings, limit)
    _register_artifacts(mcp, settings, limit)
    _register_resource(mcp)


def _register_workspace(mcp: MCPServer[SandboxService], settings: Settings, limit_field: FieldInfo) -> None:
    @mcp.tool(
        title="Write file",
        description=(
            "Create or replace a file in a sandbox; missing directories are made. It stays until the sandbox ends. "
            f"At most {settings.files.max_write_bytes:,} bytes."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=True),
    )
    async def write_file(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: WorkspacePath,
        content: Annotated[str, Field(description="The whole content of the file.")],
        encoding: Annotated[
            Literal["text", "base64"],
            Field(description="text: content is written as UTF-8; base64: it is decoded first."),
        ] = "text",
    ) -> WrittenFile:
        with tool_errors():
            data = _bytes_of(content, encoding)
            return await service_of(ctx).write(owner_of(ctx), sandbox_id, path, data)

    @mcp.tool(
        title="Read file",
        description=(
            f"Read a file of a sandbox: text, up to {settings.output.page_bytes:,} bytes at once (the end of the "
            "answer says how to read on), a picture as an image, other binary files as a resource link."
        ),
        annotations=hints(read_only=True, destructive=False, idempotent=True),
        structured_output=False,
    )
    async def read_file(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: WorkspacePath,
        offset: Offset = 0,
        limit: Annotated[int, limit_field] = settings.output.page_bytes,
    ) -> CallToolResult:
        with tool_errors():
            return await _shown(ctx, sandbox_id, resolve(path), offset, limit, "read_file")

    @mcp.tool(
        title="List files",
        description=f"List a directory of a sandbox, at most {settings.files.max_entries} entries.",
        annotations=hints(read_only=True, destructive=False, idempotent=True),
    )
    async def list_files(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: WorkspacePath = WORKSPACE,
        recursive: Annotated[bool, Field(description="Also what is in its subdirectories.")] = False,
    ) -> FileList:
        with tool_errors():
            return await service_of(ctx).list_files(owner_of(ctx), sandbox_id, path, recursive=recursive)


def _register_artifacts(mcp: MCPServer[SandboxService], settings: Settings, limit_field: FieldInfo) -> None:
    @mcp.tool(
        title="List artifacts",
        description=f"List the artifacts of a sandbox: every file that runs have put in {OUTPUTS}. They end with it.",
        annotations=hints(read_only=True, destructive=False, idempotent=True),
    )
    async def list_artifacts(ctx: ToolContext, sandbox_id: SandboxId) -> ArtifactList:
        with tool_errors():
            return await service_of(ctx).artifacts(owner_of(ctx), sandbox_id)

    @mcp.tool(
        title="Read artifact",
        description=(
            f"Read an artifact, a file in {OUTPUTS}: a picture as an image, text up to {settings.output.page_bytes:,} "
            "bytes at once (the end of the answer says how to read on), other binary files as a resource link."
        ),
        annotations=hints(read_only=True, destructive=False, idempotent=True),
        structured_output=False,
    )
    async def read_artifact(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: ArtifactPath,
        offset: Offset = 0,
        limit: Annotated[int, limit_field] = settings.output.page_bytes,
    ) -> CallToolResult:
        with tool_errors():
            where = resolve(path, OUTPUTS)
            if not where.startswith(OUTPUTS + "/"):
                raise BadRequest(
                    f"{where} is not an artifact: artifacts are in {OUTPUTS}. Use read_file for other files."
                )
            return await _shown(ctx, sandbox_id, where, offset, limit, "read_artifact")


def _register_resource(mcp: MCPServer[SandboxService]) -> None:
    @mcp.resource(
        "sandbox://{box}/{+path}",
        title="File of a sandbox",
        description="Any file of a sandbox that is alive, whole.",
        mime_type="application/octet-stream",
    )
    async def sandbox_file(ctx: ToolContext, box: str, path: str) -> str | bytes:
        try:
            data = await service_of(ctx).read_all(owner_of(ctx), box, f"/{path}")
        except (SandboxNotFound, FileError) as error:
            raise ResourceNotFoundError(with_next_step(error, NEXT_STEPS)) from error
        except SandboxError as error:
            raise ResourceError(with_next_step(error, NEXT_STEPS)) from error
        text = decoded(data, at_end=True)
        return data if text is None else text


async def _shown(ctx: ToolContext, sandbox_id: str, where: str, offset: int, limit: int, tool: str) -> CallToolResult:
    blocks = await read_blocks(service_of(ctx), owner_of(ctx), sandbox_id, where, offset, limit, tool)
    return CallToolResult(content=blocks)


def _bytes_of(content: str, encoding: Literal["text", "base64"]) -> bytes:
    try:
        return base64.b64decode(content, validate=True) if encoding == "base64" else content.encode()
    except binascii.Error as error:
        raise BadRequest(f"content is not valid base64 ({error}). Send plain text with encoding=text.") from error
    except UnicodeEncodeError as error:
        raise BadRequest("content has an unpaired surrogate and cannot be UTF-8. Send it as base64.") from error
