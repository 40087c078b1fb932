"""What the agent orders a kernel to run."""

from typing import Any

from guest.protocol import Frame, decode_json


def split(frame: Frame) -> tuple[str, dict[str, Any]]:
    """The code of an order and the options behind it, of which most have none."""
    header, body = frame
    size = header.get("code_bytes")
    if size is None:
        return body.decode("utf-8", "replace"), {}
    return body[:size].decode("utf-8", "replace"), decode_json(body[size:])
