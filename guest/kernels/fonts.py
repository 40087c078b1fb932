"""Fonts that matplotlib draws with are read into memory when they are opened.

FreeType reads a few bytes of the file at a time, through Python: 3,000 system calls for a figure with a line and two
axes. In gVisor these took as long as drawing the rest of it.
"""

import io
from contextlib import suppress
from functools import wraps
from typing import Any

MAX_BYTES = 2 * 1024 * 1024  # of one file; fonts for Chinese have tens of megabytes, and few of their glyphs are drawn


class Loaded(io.BytesIO):
    """A file in memory that knows where it comes from: matplotlib asks fonts for the names of their files."""

    name: Any = None


def load_fonts(module: Any) -> None:  # noqa: ANN401 - matplotlib.ft2font
    """Have every font opened in memory from now on. matplotlib opens its file with `io.open`."""
    construct = module.FT2Font.__init__

    @wraps(construct)
    def construct_in_memory(font: Any, filename: Any, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as it is
        open_file = getattr(io.open, "original", io.open)  # another thread may be opening a font, too

        def open_font(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as `io.open`
            opened = open_file(file, mode, *args, **options)
            return loaded(opened) if mode == "rb" and file == filename else opened  # another thread may open others

        open_font.original = open_file  # type: ignore[attr-defined]
        io.open = open_font
        try:
            construct(font, filename, *args, **options)
        finally:
            io.open = open_file

    with suppress(TypeError):  # a release in which it cannot be replaced
        module.FT2Font.__init__ = construct_in_memory


def loaded(file: Any) -> Any:  # noqa: ANN401 - a file opened for reading
    """Return the contents of a file as another file, which needs no system calls, unless it is large."""
    head = file.read(MAX_BYTES + 1)
    if len(head) > MAX_BYTES:
        file.seek(0)
        return file
    copy = Loaded(head)
    copy.name = file.name
    file.close()
    return copy
