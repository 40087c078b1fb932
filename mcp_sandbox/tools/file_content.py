"""A file of a sandbox as a model can take it in: text in parts, an image, or a link."""

from mcp_types import ContentBlock

from guest.client.messages import FileChunk
from mcp_sandbox.sandboxes.file_access import SNIFF_BYTES, artifact_view, image_mime
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.content import call, image_block, link_block, text_block
from mcp_sandbox.views import ImageView, file_uri, mime_of

UTF8_REST_BYTES = 3  # of a character of up to four bytes, the most that a cut can leave


async def file_blocks(
    service: SandboxService, owner: str, sandbox_id: str, path: str, offset: int, limit: int, tool: str
) -> list[ContentBlock]:
    """Return what `tool` answers for the file at the absolute `path`."""
    chunk = await service.read(owner, sandbox_id, path, offset=offset, limit=max(limit, SNIFF_BYTES))
    if offset == 0 and (mime := image_mime(chunk.data)):
        room = service.settings.output.image_bytes
        if chunk.size <= room:
            data = await service.read_all(owner, sandbox_id, path, max_bytes=room)  # the guest may lie about the size
            return [image_block(ImageView(path=path, mime_type=mime, data=data))]
        note = f"{path} is an image of {chunk.size:,} bytes, too large to show. Shrink it in the sandbox, or read"
        return _linked(f"{note} {file_uri(sandbox_id, path)} with resources/read.", sandbox_id, path, chunk)
    part = chunk.data[: max(limit, UTF8_REST_BYTES + 1)]
    start = _first_character(part) if offset else 0
    text = decoded(part[start:], at_end=offset + len(part) >= chunk.size)
    if text is None:
        note = f"{path} is binary ({mime_of(path)}, {chunk.size:,} bytes). Read {file_uri(sandbox_id, path)}"
        advice = "with resources/read, or let code in the sandbox examine it."
        return _linked(f"{note} {advice}", sandbox_id, path, chunk)
    return [text_block(text), *_paging(chunk, text, offset + start, tool, sandbox_id, path)]


def _linked(text: str, sandbox_id: str, path: str, chunk: FileChunk) -> list[ContentBlock]:
    return [text_block(text), link_block(artifact_view(path, chunk.size, sandbox_id))]


def _first_character(data: bytes) -> int:
    """Return where the first whole character begins; a cut may have left the rest of one before it."""
    start = 0
    while start < min(UTF8_REST_BYTES, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return start


def decoded(data: bytes, *, at_end: bool) -> str | None:
    """Return the text in a part of a file, without an incomplete last character; None if it is not text."""
    for cut in range(1 if at_end else UTF8_REST_BYTES + 1):
        try:
            text = data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
        return None if "\0" in text else text
    return None


def _paging(chunk: FileChunk, text: str, offset: int, tool: str, sandbox_id: str, path: str) -> list[ContentBlock]:
    if offset > chunk.size:
        return [text_block(f"[offset {offset:,} is past the end: the file has {chunk.size:,} bytes]")]
    end = offset + len(text.encode())
    if end >= chunk.size:
        return [] if text else [text_block("[the file is empty]" if not chunk.size else "[end of the file]")]
    read_on = call(tool, sandbox_id=sandbox_id, path=path, offset=end)
    return [text_block(f"[bytes {offset:,} to {end:,} of {chunk.size:,}; to read on: {read_on}]")]
