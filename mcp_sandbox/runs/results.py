"""What a run is asked for, and what comes of it: events from the machine fold into one result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guest.client.messages import (
    Artifact,
    CodeError,
    Display,
    Event,
    Finished,
    Language,
    Output,
    RunKind,
    State,
    Status,
)
from guest.client.reports import CompiledReport, HandlerReport, Report
from mcp_sandbox.runs.output import OutputLog

MAX_DISPLAYS = 100  # a loop that displays must not fill the host's memory
MAX_ARTIFACTS = 1000
READABLE_FORMS = ("text/markdown", "text/plain", "text/latex", "application/json")  # the first a value has is taken


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Code to run for an owner, in a sandbox of theirs or in a fresh one that ends with the run."""

    owner: str
    code: str
    sandbox_id: str | None = None
    template: str | None = None
    timeout_s: float | None = None
    kind: RunKind = "code"
    options: Mapping[str, Any] | None = None  # JSON for the kind of run, or for the template's language


@dataclass(frozen=True, slots=True)
class Captured:
    """What is kept of an output stream: all of it, or its two ends."""

    head: str = ""
    tail: str = ""
    omitted_bytes: int = 0  # between the two
    spill: str | None = None  # where in the sandbox the stream is, when some of it is left out
    spill_bytes: int | None = None  # how much of it is there if it did not fit; None: all of it
    log_offset: int | None = None  # where in the run's log the part that is left out begins; None: not there either

    def __bool__(self) -> bool:
        return bool(self.head or self.tail or self.omitted_bytes)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, ready to be shown."""

    name: str
    mime: str
    data: bytes


@dataclass(frozen=True, slots=True)
class RunTimings:
    """Where the time went, in milliseconds."""

    queue_ms: float
    restore_ms: float
    run_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """All there is to say about one run."""

    sandbox_id: str | None  # None: the sandbox ended with the run
    run_id: str
    lost_before: bool  # variables from earlier runs were lost before this one began
    status: Status
    timed_out_after_s: float | None
    stopped: bool  # somebody wanted it to end
    state: State
    exit_code: int | None
    signal: str | None
    error: CodeError | None
    stdout: Captured
    stderr: Captured
    displays: tuple[Display, ...]
    displays_dropped: int  # values that were too many or too large to be sent
    artifacts: tuple[Artifact, ...]
    pictures: tuple[Picture, ...]  # the artifacts that are small enough to be shown at once
    timings: RunTimings
    report: Report | None = None  # what the run has measured, where it does
    service_loss: str | None = None  # how the template's service ended, if it has
    language: Language = "python"  # of the sandbox
    kind: RunKind = "code"
    expires_in_s: float | None = None  # until the sandbox ends if it is not used

    @property
    def left_out(self) -> bool:
        """Whether output is missing here that only the run's log has."""
        return any(stream.spill is None and stream.log_offset is not None for stream in (self.stdout, self.stderr))


class HeadTail:
    """Keeps the first and the last bytes of a stream, however long it gets."""

    def __init__(self, head_bytes: int, tail_bytes: int) -> None:
        self._head_room = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._omitted = 0
        self._gaps = 0  # of what is omitted, what never came here
        self._log_offset: int | None = None  # where in the log the first byte after the head is

    def add(self, text: str, gap_bytes: int = 0, log_offset: int = 0) -> None:
        """Take in more text, which comes `gap_bytes` after what came before and is in the log at `log_offset`."""
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
        """The bytes that came so far, and those that were left out."""
        return len(self._head) + self._omitted + len(self._tail)

    def captured(self, spill: str | None = None, spill_bytes: int | None = None) -> Captured:
        """What is kept, when the machine has the stream, or its first `spill_bytes`, in the file `spill`."""
        self._trim(self._tail_bytes)
        if not self._omitted:
            return Captured((self._head + self._tail).decode(errors="replace"))
        # A cut may fall inside a character; its pieces are dropped.
        head, tail = self._head.decode(errors="ignore"), self._tail.decode(errors="ignore")
        log_offset = self._log_offset if self._omitted > self._gaps else None
        return Captured(head, tail, self._omitted, spill, spill_bytes, log_offset)

    def _trim(self, tail_bytes: int) -> None:
        excess = max(0, len(self._tail) - tail_bytes)
        del self._tail[:excess]
        self._omitted += excess


def readable(display: Display) -> str:
    """The form of a shown value that reads best, or nothing."""
    return next((display.data[form] for form in READABLE_FORMS if form in display.data), "")


@dataclass(slots=True)
class Fold:
    """Collects the events of one run."""

    stdout: HeadTail
    stderr: HeadTail
    log: OutputLog = field(default_factory=lambda: OutputLog(0))
    displays: list[Display] = field(default_factory=list)
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
            case Display() if len(self.displays) < MAX_DISPLAYS:
                self.displays.append(event)
            case Display():
                self.displays_dropped += 1
            case Artifact() if len(self.artifacts) < MAX_ARTIFACTS:
                self.artifacts[event.path] = event
            case CompiledReport() | HandlerReport():
                self.report = event
            case Finished():
                self.finished = event
