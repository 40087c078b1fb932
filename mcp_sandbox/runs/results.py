"""Folds the events of a run into one result."""

from dataclasses import dataclass, field

from guest.client.messages import (
    Artifact,
    Display,
    Event,
    Finished,
    Output,
)
from guest.client.reports import CompiledReport, HandlerReport, Report
from mcp_sandbox.runs.output import OutputLog
from mcp_sandbox.views import StreamView
from mcp_sandbox.views.text import collapsed

MAX_DISPLAYS = 100  # a loop that displays must not fill the host's memory
MAX_DISPLAY_CHARS = 512 * 1024  # of all of them, names of files included


class HeadTail:
    """Keeps the first and the last bytes of a stream, however long it gets.

    Of a stream that is too long, progress bars are collapsed first: their last state may be all there is to tell.
    """

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head_room = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._omitted = 0
        self._gaps = 0  # omitted bytes that never arrived here
        self._collapsed = 0  # bytes of earlier states of progress bars
        self._collapsible = True  # it has helped so far
        self._log_offset: int | None = None  # where in the log the first byte after the head is

    def add(self, text: str, gap_bytes: int = 0, log_offset: int = 0) -> None:
        """Add text that follows earlier text after a gap of `gap_bytes`, and is in the log at `log_offset`."""
        if gap_bytes:
            self._head_room, self._collapsible = 0, False
            self._trim(0)
            self._omitted += gap_bytes
            self._gaps += gap_bytes
        data = text.encode(errors="replace")
        room = self._head_room
        if len(data) > room and self._collapsible and not self._tail and (b"\r" in data or b"\r" in self._head):
            data, room = self._collapse_head(data), 0  # the log has all of it: reading on may repeat, but never skips
        if self._log_offset is None and (gap_bytes or len(data) > self._head_room):
            self._log_offset = log_offset + room
        self._head += data[: self._head_room]
        self._tail += data[self._head_room :]
        self._head_room = max(0, self._head_room - len(data))
        if len(self._tail) > 2 * self._tail_bytes:  # trimmed now and then, not for every line
            self._trim(self._tail_bytes)

    @property
    def total(self) -> int:
        """The number of bytes so far, omitted ones included."""
        return len(self._head) + self._omitted + len(self._tail) + self._collapsed

    def captured(self, spill: str | None = None, spill_bytes: int | None = None) -> StreamView:
        """Return what is kept. The machine has the stream, or its first `spill_bytes`, in the file `spill`."""
        self._trim(self._tail_bytes)
        if not self._omitted:
            return StreamView(head=(self._head + self._tail).decode(errors="replace"))
        # A cut may fall inside a character; its pieces are dropped.
        head, tail = self._head.decode(errors="ignore"), self._tail.decode(errors="ignore")
        log_offset = self._log_offset if self._omitted > self._gaps else None
        return StreamView(
            head=head,
            tail=tail,
            omitted_bytes=self._omitted,
            spill=spill,
            spill_bytes=spill_bytes,
            log_offset=log_offset,
        )

    def _collapse_head(self, data: bytes) -> bytes:
        """Return all bytes so far and `data`, collapsed; the head is empty then.

        If that does not save half of the room, it is not worth trying again for every line.
        """
        whole = bytes(self._head) + data
        short = self._collapse(whole)
        self._collapsible = len(short) <= len(whole) // 2
        self._head_room += len(self._head)
        self._head.clear()
        return short

    def _collapse(self, data: bytes) -> bytes:
        if b"\r" not in data:
            return data
        # A character that is cut at the end of the bytes stays as it is.
        short = collapsed(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        self._collapsed += len(data) - len(short)
        return short

    def _trim(self, tail_bytes: int) -> None:
        if len(self._tail) > tail_bytes > 0:
            self._tail[:] = self._collapse(bytes(self._tail))
        excess = max(0, len(self._tail) - tail_bytes)
        del self._tail[:excess]
        self._omitted += excess


@dataclass(slots=True)
class Fold:
    """Collects the events of one run."""

    stdout: HeadTail
    stderr: HeadTail
    log: OutputLog = field(default_factory=lambda: OutputLog(0))
    displays: list[Display] = field(default_factory=list)
    display_room: int = MAX_DISPLAY_CHARS
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    displays_dropped: int = 0
    report: Report | None = None
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case Output():
                ends = self.stdout if event.stream == "stdout" else self.stderr
                ends.add(event.text, event.gap_bytes, len(self.log))
                self.log.add(event.stream, event.text, event.gap_bytes)
            case Display():
                self._add_display(event)
            case Artifact():
                self.artifacts[event.path] = event
            case CompiledReport() | HandlerReport():
                self.report = event
            case Finished():
                self.finished = event

    def _add_display(self, display: Display) -> None:
        size = sum(map(len, (*display.data, *display.data.values(), *display.files)))
        size += len(repr(display.chart)) if display.chart else 0
        if len(self.displays) >= MAX_DISPLAYS or size > self.display_room:
            self.displays_dropped += 1
            return
        self.display_room -= size
        self.displays.append(display)
