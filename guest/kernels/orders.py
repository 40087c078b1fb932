"""What the agent orders a kernel to run."""

# pathlib costs imports and instructions that an emulated CPU feels

import os
from typing import Any

from guest.protocol import Frame, decode_json


def split(frame: Frame) -> tuple[str, dict[str, Any]]:
    """The code of an order and the options behind it, of which most have none."""
    header, body = frame
    size = header.get("code_bytes")
    if size is None:
        return body.decode("utf-8", "replace"), {}
    return body[:size].decode("utf-8", "replace"), decode_json(body[size:])


def as_file(data: bytes) -> int:
    """A descriptor to read `data` from: nobody has to stand by and write."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
