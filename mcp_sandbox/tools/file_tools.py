"""Tools that read and write files of a sandbox, and the resource that serves whole files."""

import base64
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
from mcp_sandbox.tools.common import ListOffset, SandboxId, ToolContext, hints, owner_of, service_of, tool_errors
from mcp_sandbox.tools.file_content import MAX_BLOB_BYTES, Encoding, Reading, decoded, read_part
from mcp_sandbox.tools.next_steps import NEXT_STEPS
from mcp_sandbox.views import FILE_META, ArtifactList, FileList, WrittenFile, with_next_step

WorkspacePath = Annotated[
    str, Field(min_length=1, max_length=4095, description=f"Absolute, or relative to {WORKSPACE}.")
]
ArtifactPath = Annotated[str, Field(min_length=1, max_length=4095, description=f"Absolute, or relative to {OUTPUTS}.")]
Offset = Annotated[int, Field(ge=0, lt=2**63, description="Byte to begin with.")]
ReadEncoding = Annotated[Encoding, Field(description="base64: also text and images.")]


def register(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    """Add these tools and the resource."""
    limit = Field(
        ge=1,
        le=MAX_BLOB_BYTES,
        description=f"Most bytes; of text at most {settings.output.page_bytes}.",
    )
    _register_writing(mcp, settings)
    _register_reading(mcp, settings, limit)
    _register_artifacts(mcp, limit)
    _register_resource(mcp)


def _register_writing(mcp: MCPServer[SandboxService], settings: Settings) -> None:
    @mcp.tool(
        title="Write file",
        description=(
            "Write a file in a sandbox, and its missing directories. "
            f"At most {settings.files.max_write_bytes:,} bytes at once; append more."
        ),
        annotations=hints(read_only=False, destructive=True, idempotent=False),
    )
    async def write_file(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: WorkspacePath,
        content: Annotated[str, Field(description="Text, or base64.")],
        encoding: Annotated[Literal["text", "base64"], Field(description="base64: content is decoded first.")] = "text",
        append: Annotated[bool, Field(description="Add to the end instead of replacing the file.")] = False,
    ) -> WrittenFile:
        with tool_errors():
            data = _bytes_of(content, encoding)
            return await service_of(ctx).write(owner_of(ctx), sandbox_id, path, data, append=append)


def _register_reading(mcp: MCPServer[SandboxService], settings: Settings, limit_field: FieldInfo) -> None:
    @mcp.tool(
        title="Read file",
        description=(
            "Read a file of a sandbox: text, images as images, other files as base64. Long files come in parts; the "
            "answer says how to read on."
        ),
        annotations=hints(read_only=True, destructive=False, idempotent=True),
        structured_output=False,
    )
    async def read_file(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: WorkspacePath,
        offset: Offset = 0,
        limit: Annotated[int | None, limit_field] = None,
        encoding: ReadEncoding = "auto",
    ) -> CallToolResult:
        with tool_errors():
            return await _shown(ctx, Reading("read_file", sandbox_id, resolve(path), offset, limit, encoding))

    @mcp.tool(
        title="List files",
        description=(
            f"List a directory of a sandbox, {settings.files.max_entries} entries at a time; next_offset is the next "
            "offset."
        ),
        annotations=hints(read_only=True, destructive=False, idempotent=True),
    )
    async def list_files(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: WorkspacePath = WORKSPACE,
        recursive: Annotated[bool, Field(description="Include subdirectories.")] = False,
        offset: ListOffset = 0,
    ) -> FileList:
        with tool_errors():
            return await service_of(ctx).list_files(owner_of(ctx), sandbox_id, path, recursive=recursive, offset=offset)


def _register_artifacts(mcp: MCPServer[SandboxService], limit_field: FieldInfo) -> None:
    @mcp.tool(
        title="List artifacts",
        description=(
            f"List the artifacts of a sandbox, in pages: all files in {OUTPUTS}. They are deleted with the sandbox."
        ),
        annotations=hints(read_only=True, destructive=False, idempotent=True),
    )
    async def list_artifacts(ctx: ToolContext, sandbox_id: SandboxId, offset: ListOffset = 0) -> ArtifactList:
        with tool_errors():
            return await service_of(ctx).artifacts(owner_of(ctx), sandbox_id, offset=offset)

    @mcp.tool(
        title="Read artifact",
        description=f"Read an artifact, a file in {OUTPUTS}, as read_file does.",
        annotations=hints(read_only=True, destructive=False, idempotent=True),
        structured_output=False,
    )
    async def read_artifact(
        ctx: ToolContext,
        sandbox_id: SandboxId,
        path: ArtifactPath,
        offset: Offset = 0,
        limit: Annotated[int | None, limit_field] = None,
        encoding: ReadEncoding = "auto",
    ) -> CallToolResult:
        with tool_errors():
            where = resolve(path, OUTPUTS)
            if not where.startswith(OUTPUTS + "/"):
                raise BadRequest(
                    f"{where} is not an artifact: artifacts are in {OUTPUTS}. Use read_file for other files."
                )
            return await _shown(ctx, Reading("read_artifact", sandbox_id, where, offset, limit, encoding))


def _register_resource(mcp: MCPServer[SandboxService]) -> None:
    @mcp.resource(
        "sandbox://{sandbox_id}/{+path}",
        title="File in a sandbox",
        description="Any whole file of a live sandbox.",
        mime_type="application/octet-stream",
    )
    async def sandbox_file(ctx: ToolContext, sandbox_id: str, path: str) -> str | bytes:
        try:
            data = await service_of(ctx).read_all(owner_of(ctx), sandbox_id, f"/{path}")
        except (SandboxNotFound, FileError) as error:
            raise ResourceNotFoundError(with_next_step(error, NEXT_STEPS)) from error
        except SandboxError as error:
            raise ResourceError(with_next_step(error, NEXT_STEPS)) from error
        text = decoded(data, at_end=True)
        return data if text is None else text


async def _shown(ctx: ToolContext, ask: Reading) -> CallToolResult:
    blocks, part = await read_part(service_of(ctx), owner_of(ctx), ask)
    return CallToolResult(content=blocks, _meta={FILE_META: part.model_dump(mode="json")})


def _bytes_of(content: str, encoding: Literal["text", "base64"]) -> bytes:
    try:
        # Programs break base64 into lines.
        return base64.b64decode("".join(content.split()), validate=True) if encoding == "base64" else content.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("content has an unpaired surrogate and cannot be UTF-8. Send it as base64.") from error
    except ValueError as error:  # of base64: also for characters beyond ASCII
        raise BadRequest(f"content is not valid base64 ({error}). Send plain text with encoding=text.") from error
