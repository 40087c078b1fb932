"""MCP content blocks, and tool calls that a model can copy."""

import base64
import json
from collections.abc import Sequence
from itertools import accumulate

from mcp_types import BlobResourceContents, EmbeddedResource, ImageContent, ResourceLink, TextContent

from mcp_sandbox.views import ArtifactView, ImageView


def text_block(text: str) -> TextContent:
    """Return text for the model."""
    return TextContent(type="text", text=text)


def image_block(image: ImageView) -> ImageContent:
    """Return an image for the model."""
    return ImageContent(type="image", data=base64.b64encode(image.data).decode(), mime_type=image.mime_type)


def blob_block(uri: str, mime_type: str, data: bytes) -> EmbeddedResource:
    """Return bytes of a file, which clients save or hand on."""
    blob = base64.b64encode(data).decode()
    return EmbeddedResource(type="resource", resource=BlobResourceContents(uri=uri, mime_type=mime_type, blob=blob))


def link_block(artifact: ArtifactView) -> ResourceLink:
    """Return a link to a file that is not shown."""
    return ResourceLink(
        type="resource_link",
        name=artifact.path.rpartition("/")[2],
        uri=artifact.uri or "",
        mime_type=artifact.mime_type,
        size=artifact.size,
    )


def call(tool: str, **arguments: str | int) -> str:
    """Return a tool call that a model can copy."""
    return f"{tool}({', '.join(f'{name}={quoted(value)}' for name, value in arguments.items())})"


def quoted(value: str | int) -> str:
    """Return a value as JSON, so that a hostile file name can neither break a line nor pass for more than a name.

    Characters that are invisible or turn the writing direction are escaped, too.
    """
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def fitting(texts: Sequence[str], room: int) -> list[str]:
    """Return the first texts that together are no longer than `room`."""
    lengths = accumulate(map(len, texts))
    return [text for text, length in zip(texts, lengths, strict=True) if length <= room]
