"""Operations on whole directories, as tar archives that are streamed both ways."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response, StreamingResponse

from mcp_sandbox.rest.bodies import FolderQuery, Nothing
from mcp_sandbox.rest.files import DOWNLOAD, FILES, received
from mcp_sandbox.rest.operations import Call, Operation, answered
from mcp_sandbox.views import UnpackedArchive

TAR = "application/x-tar"


async def pack(call: Call[FolderQuery, Nothing]) -> Response:
    """Answer with an archive. Errors before its first bytes are ordinary answers."""
    parts = call.service.pack(call.owner, call.sandbox_id, call.query.path)
    first = await anext(parts)
    if call.request.method == "HEAD":
        await parts.aclose()
        return Response(None, 200, DOWNLOAD, TAR)
    return StreamingResponse(_sent(first, parts), 200, DOWNLOAD, TAR)


async def _sent(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield first
        async for part in rest:
            yield part


async def unpack(call: Call[FolderQuery, Nothing]) -> Response:
    """Answer when the whole archive is unpacked."""
    content = received(call.request, call.query.path)
    return answered(await call.service.unpack(call.owner, call.sandbox_id, call.query.path, content))


ARCHIVE = f"{FILES}/archive"
OPERATIONS = (
    Operation(
        "GET",
        ARCHIVE,
        "read_archive",
        "Download a directory as a tar archive, without links",
        {200: TAR},
        pack,
        ("read_file",),
        query=FolderQuery,
    ),
    Operation(
        "PUT",
        ARCHIVE,
        "write_archive",
        "Unpack a plain tar archive into a directory, which is created",
        {200: UnpackedArchive},
        unpack,
        ("write_file",),
        query=FolderQuery,
        uploads=True,
    ),
)
