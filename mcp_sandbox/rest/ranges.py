"""The Range header: one range of bytes."""

import re
from typing import NamedTuple

RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Span(NamedTuple):
    """A part of a file."""

    start: int
    length: int


def wanted(header: str | None, size: int) -> Span | None:
    """Return the part of a file of `size` bytes that a client wants; None: all of it.

    A header that is not one range of bytes is ignored, as HTTP allows.

    Raises:
        ValueError: the file has no such part.
    """
    match = RANGE.fullmatch((header or "").strip())
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= end:
        raise ValueError("the range is beyond the end of the file")
    return Span(start, end - start)
