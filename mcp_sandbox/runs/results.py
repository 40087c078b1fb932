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

MAX_DISPLAYS = 100  # a loop that displays must not fill the host's memory
MAX_DISPLAY_CHARS = 512 * 1024  # of all of them, names of files included


class HeadTail:
    """Keeps the first and the last bytes of a stream, however long it gets."""

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head_room = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._omitted = 0
        self._gaps = 0  # omitted bytes that never arrived here
        self._log_offset: int | None = None  # where in the log the first byte after the head is

    def add(self, text: str, gap_bytes: int = 0, log_offset: int = 0) -> None:
        """Add text that follows earlier text after a gap of `gap_bytes`, and is in the log at `log_offset`."""
        if gap_bytes:
            self._head_room = 0
            self._trim(0)
            self._omitted += gap_bytes
            self._gaps += gap_bytes
        data = text.encode(errors="replace")
        if self._log_offset is None and (gap_bytes or len(data) > self._head_room):
            self._log_offset = log_offset + self._head_room
        self._head += data[: self._head_room]
        self._tail += data[self._head_room :]
        self._head_room = max(0, self._head_room - len(data))
        if len(self._tail) > 2 * self._tail_bytes:  # trimmed now and then, not for every line
            self._trim(self._tail_bytes)

    @property
    def total(self) -> int:
        """The number of bytes so far, omitted ones included."""
        return len(self._head) + self._omitted + len(self._tail)

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

    def _trim(self, tail_bytes: int) -> None:
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
        if len(self.displays) >= MAX_DISPLAYS or size > self.display_room:
            self.displays_dropped += 1
            return
        self.display_room -= size
        self.displays.append(display)
