"""A run's output, during and after the run: one text of both streams that can be read page by page."""

import anyio

from guest.client.messages import Stream
from guest.client.wire import one_line
from mcp_sandbox.views import OutputPage

LINE_CHARS = 200  # of the newest line shown as progress
LINE_SEARCH_BYTES = 4096  # how far back to look for the newest line


class OutputLog:
    """Stdout and stderr as UTF-8, in the order in which they arrived. Notes mark missing bytes.

    It is bounded: output that arrives when it is full is counted but not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes
        self._data = bytearray()
        self._lost = 0
        self._news = anyio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._data)

    def add(self, stream: Stream, text: str, gap_bytes: int = 0) -> None:
        """Add output that follows the stream's previous output after a gap of `gap_bytes`."""
        note = f"\n[… {gap_bytes:,} bytes of {stream} are missing here …]\n" if gap_bytes else ""
        data = f"{note}{text}".encode(errors="replace")
        if self._lost or len(data) > self._room:
            self._lost += gap_bytes + len(data)
            return
        self._room -= len(data)
        self._append(data)

    def close(self) -> None:
        """Note how much was not kept, and wake readers: no more output will come."""
        self._closed = True
        note = f"\n[… {self._lost:,} bytes of output that came after this were not kept …]\n" if self._lost else ""
        self._append(note.encode())

    def page(self, offset: int, limit: int) -> OutputPage:
        """Return up to `limit` bytes from `offset` on, without splitting a character."""
        size = len(self._data)
        start = self._character_at(min(offset, size))
        end = self._character_at(min(start + limit, size))
        text = self._data[start:end].decode(errors="replace")
        return OutputPage(text=text, start=start, end=end, size=size)

    def newest_line(self) -> str:
        """Return the last line that is not empty, cut to `LINE_CHARS` and without control characters."""
        lines = self._data[-LINE_SEARCH_BYTES:].decode(errors="ignore").splitlines()
        return next((one_line(line.strip(), LINE_CHARS) for line in reversed(lines) if line.strip()), "")

    async def grown(self, size: int) -> None:
        """Wait until the log has `size` bytes or is closed."""
        while len(self._data) < size and not self._closed:
            await self._news.wait()

    def _append(self, data: bytes) -> None:
        self._data += data
        news, self._news = self._news, anyio.Event()
        news.set()

    def _character_at(self, offset: int) -> int:
        """Return the first offset from `offset` on that is the start of a character."""
        while offset < len(self._data) and self._data[offset] & 0xC0 == 0x80:
            offset += 1
        return offset
