"""A file of a sandbox as a model can take it in: text or bytes in parts, or an image."""

from dataclasses import dataclass
from typing import Literal

from mcp_types import ContentBlock

from guest.client.messages import FileChunk
from mcp_sandbox.sandboxes.file_access import CHUNK_BYTES, SNIFF_BYTES, artifact_view, image_mime
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.tools.content import blob_block, call, image_block, link_block, text_block
from mcp_sandbox.views import FilePart, ImageView, file_uri, mime_of

UTF8_REST_BYTES = 3  # of a character of up to four bytes, the most that a cut can leave
MAX_BLOB_BYTES = CHUNK_BYTES  # of one answer; programs ask for so many, models get as many as a page of text has

Encoding = Literal["auto", "base64"]
Shown = tuple[list[ContentBlock], FilePart]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a call of read_file or read_artifact asks for."""

    tool: str
    sandbox_id: str
    path: str  # absolute
    offset: int
    limit: int | None
    encoding: Encoding

    def part(self, chunk: FileChunk, start: int, end: int) -> FilePart:
        """Return which part of the file is shown."""
        next_offset = end if end < chunk.size else None
        return FilePart(path=self.path, size=chunk.size, offset=start, next_offset=next_offset)

    def read_on(self, offset: int, **more: str | int) -> str:
        """Return the call that reads the next part."""
        return call(self.tool, sandbox_id=self.sandbox_id, path=self.path, offset=offset, **more)


async def read_part(service: SandboxService, owner: str, ask: Reading) -> Shown:
    """Return what the tool answers, and which part of the file that is."""
    page, image_bytes = service.settings.output.page_bytes, service.settings.output.image_bytes
    most = max(min(ask.limit or page, MAX_BLOB_BYTES), SNIFF_BYTES)
    chunk = await service.read(owner, ask.sandbox_id, ask.path, offset=ask.offset, limit=most)
    if ask.offset > chunk.size and not chunk.data:
        note = f"[offset {ask.offset:,} is past the end: the file has {chunk.size:,} bytes]"
        return [text_block(note)], ask.part(chunk, ask.offset, ask.offset)
    if ask.encoding == "base64":
        return _blob(ask, chunk, page)
    if ask.offset == 0 and (mime := image_mime(chunk.data)):
        if chunk.size > image_bytes:
            return _large_image(ask, chunk)
        data = await service.read_all(owner, ask.sandbox_id, ask.path, max_bytes=image_bytes)  # the guest may lie
        return [image_block(ImageView(path=ask.path, mime_type=mime, data=data))], ask.part(chunk, 0, len(data))
    return _text(ask, chunk, page) or _blob(ask, chunk, page)


def _text(ask: Reading, chunk: FileChunk, page: int) -> Shown | None:
    """Return a part of a file as text; None if it is not text."""
    part = chunk.data[: max(min(ask.limit or page, page), UTF8_REST_BYTES + 1)]
    skipped = _first_character(part) if ask.offset else 0
    text = decoded(part[skipped:], at_end=ask.offset + len(part) >= chunk.size)
    if text is None:
        return None
    start = ask.offset + skipped
    end = start + len(text.encode())
    notes: list[ContentBlock] = []
    if end < chunk.size:
        notes = [text_block(f"[bytes {start:,} to {end:,} of {chunk.size:,}; to read on: {ask.read_on(end)}]")]
    elif not text:
        notes = [text_block("[the file is empty]" if not chunk.size else "[end of the file]")]
    return [text_block(text), *notes], ask.part(chunk, start, end)


def _blob(ask: Reading, chunk: FileChunk, page: int) -> Shown:
    """Return bytes of a file as base64. Unless the call says how many, the base64 is as long as a page of text."""
    data = chunk.data[: ask.limit or page // 4 * 3]
    end = ask.offset + len(data)
    uri, mime = file_uri(ask.sandbox_id, ask.path), mime_of(ask.path)
    what = f"bytes {ask.offset:,} to {end:,} of {chunk.size:,}, {mime}, as base64"
    if end < chunk.size:
        more = {} if ask.limit is None else {"limit": ask.limit}
        what += (
            f"; to read on: {ask.read_on(end, encoding='base64', **more)}; the whole file: resources/read of the link"
        )
    blocks: list[ContentBlock] = [blob_block(uri, mime, data), text_block(f"[{what}]"), _link(ask, chunk)]
    return blocks, ask.part(chunk, ask.offset, end)


def _large_image(ask: Reading, chunk: FileChunk) -> Shown:
    note = f"{ask.path} is an image of {chunk.size:,} bytes, too large to show. Shrink it in the sandbox, or read"
    note += f" its bytes: {ask.read_on(0, encoding='base64')}"
    return [text_block(note), _link(ask, chunk)], ask.part(chunk, 0, 0)


def _link(ask: Reading, chunk: FileChunk) -> ContentBlock:
    return link_block(artifact_view(ask.path, chunk.size, ask.sandbox_id))


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
