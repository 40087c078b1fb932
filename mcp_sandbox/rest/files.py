"""Operations on files. They are streamed both ways: no more than a chunk of a file is in memory."""

from collections.abc import AsyncIterator

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mcp_sandbox.errors import FileNotFound
from mcp_sandbox.rest.bodies import DirectoryQuery, FileQuery, Nothing, PageQuery
from mcp_sandbox.rest.errors import UploadStalled
from mcp_sandbox.rest.operations import Call, Operation, answered
from mcp_sandbox.rest.problems import refusal
from mcp_sandbox.rest.ranges import Span, wanted
from mcp_sandbox.sandboxes.file_access import CHUNK_BYTES
from mcp_sandbox.views import ArtifactList, FileList, WrittenFile, mime_of

STALLED_S = 60.0  # without a byte from the client; meanwhile the sandbox can be neither forked nor paused
# Code in a sandbox writes what it likes. A browser must not run it as a page of this server.
DOWNLOAD = {
    "Cache-Control": "no-store",
    "Content-Disposition": "attachment",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def list_files(call: Call[DirectoryQuery, Nothing]) -> Response:
    """Answer with a page of a directory."""
    query = call.query
    return answered(
        await call.service.list_files(
            call.owner, call.sandbox_id, query.path, recursive=query.recursive, offset=query.offset
        )
    )


async def artifacts(call: Call[PageQuery, Nothing]) -> Response:
    """Answer with a page of the artifacts."""
    return answered(await call.service.artifacts(call.owner, call.sandbox_id, offset=call.query.offset))


async def write(call: Call[FileQuery, Nothing]) -> Response:
    """Answer when the whole file is at its path."""
    return answered(
        await call.service.write_parts(
            call.owner, call.sandbox_id, call.query.path, received(call.request, call.query.path)
        )
    )


async def received(request: Request, path: str) -> AsyncIterator[bytes]:
    """Yield the content of a request as it arrives. Raises UploadStalled."""
    content = request.stream()
    while True:
        part = None
        try:
            with anyio.fail_after(STALLED_S):
                part = await anext(content, None)
        except TimeoutError:
            raise UploadStalled(path, STALLED_S) from None
        if part is None:
            return
        yield part


async def read(call: Call[FileQuery, Nothing]) -> Response:
    """Answer with a file or a part of it."""
    path, headers = call.query.path, DOWNLOAD | {"Accept-Ranges": "bytes"}
    size = (await call.service.read(call.owner, call.sandbox_id, path, limit=1)).size
    asked = call.request.headers
    try:  # a client that has an older version must not get a part of this one: there is nothing to compare
        part = None if "if-range" in asked else wanted(asked.get("range"), size)
    except ValueError:
        return refusal(416, f"The file has {size:,} bytes.", {"Content-Range": f"bytes */{size}"})
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.start + part.length - 1}/{size}"
    if size:
        headers["Content-Length"] = str(size if part is None else part.length)
    status, kind = 200 if part is None else 206, mime_of(path)
    if call.request.method == "HEAD":
        return Response(None, status, headers, kind)
    # Files such as those in /proc have no size, but may have content.
    content = _parts(call, part or Span(0, size)) if size else _until_end(call)
    return StreamingResponse(content, status, headers, kind)


async def _parts(call: Call[FileQuery, Nothing], span: Span) -> AsyncIterator[bytes]:
    start, left = span
    while left:
        chunk = await call.service.read(
            call.owner, call.sandbox_id, call.query.path, offset=start, limit=min(left, CHUNK_BYTES)
        )
        if not chunk.data:  # it was cut short meanwhile; ending the connection early shows the client
            raise FileNotFound(call.query.path)
        start, left = start + len(chunk.data), left - len(chunk.data)
        yield chunk.data


async def _until_end(call: Call[FileQuery, Nothing]) -> AsyncIterator[bytes]:
    start, ended = 0, False
    while not ended:
        chunk = await call.service.read(call.owner, call.sandbox_id, call.query.path, offset=start, limit=CHUNK_BYTES)
        start, ended = start + len(chunk.data), chunk.eof or not chunk.data
        yield chunk.data


FILES = "/sandboxes/{sandbox_id}/files"
OPERATIONS = (
    Operation(
        "GET",
        FILES,
        "list_files",
        "List a directory",
        {200: FileList},
        list_files,
        ("list_files",),
        query=DirectoryQuery,
    ),
    Operation(
        "GET",
        f"{FILES}/content",
        "read_file",
        "Download a file, or one Range of it",
        {200: "*/*", 206: "*/*"},
        read,
        ("read_file", "read_artifact"),
        query=FileQuery,
    ),
    Operation(
        "PUT",
        f"{FILES}/content",
        "write_file",
        "Create or replace a file; its directories are created",
        {200: WrittenFile},
        write,
        ("write_file",),
        query=FileQuery,
        uploads=True,
    ),
    Operation(
        "GET",
        "/sandboxes/{sandbox_id}/artifacts",
        "list_artifacts",
        "List the files in /tmp/outputs",
        {200: ArtifactList},
        artifacts,
        ("list_artifacts",),
        query=PageQuery,
    ),
)
