"""A run: its result, or how far it has got."""

from pydantic import Field

from guest.client.messages import CodeError, Display, RunKind, State, Status
from guest.client.reports import Report
from guest.languages import LanguageName
from mcp_sandbox.views.base import View
from mcp_sandbox.views.errors import ErrorView
from mcp_sandbox.views.files import ArtifactView

RUN_META = "mcp-sandbox/run"  # where the `_meta` of an MCP result carries a RunView or RunProgress


class StreamView(View):
    """An output stream: all of it, or its start and its end."""

    head: str = ""
    tail: str = ""
    omitted_bytes: int = Field(0, description="Bytes left out between head and tail.")
    spill: str | None = Field(None, description="File in the sandbox that holds the whole stream.")
    spill_bytes: int | None = Field(None, description="Size of that file if the stream did not fit; null: complete.")
    log_offset: int | None = Field(None, description="Where the omitted part begins in the run's output log.")

    def __bool__(self) -> bool:
        return bool(self.head or self.tail or self.omitted_bytes)


class ImageView(View):
    """An image among the artifacts of a run, small enough to be shown at once."""

    path: str
    mime_type: str
    data: bytes


class RunTimings(View):
    """Where the time went, in milliseconds."""

    queue_ms: float
    restore_ms: float
    run_ms: float
    total_ms: float


class MissingModule(View):
    """A Python module that code imported and its template does not have."""

    module: str
    templates: dict[str, str] = Field(description="Templates that have it, each with the package and its version.")


class RunView(View):
    """The result of a run. Code that fails is a normal result."""

    sandbox_id: str | None = Field(description="null: the sandbox ended with the run.")
    run_id: str
    kind: RunKind
    language: LanguageName
    status: Status
    state: State = Field(description="kept, or lost: variables were lost because the process was killed.")
    lost_before: bool = Field(description="Variables had been lost before this run began.")
    timed_out_after_s: float | None
    stopped: bool = Field(description="The run ended because a client asked for it.")
    exit_code: int | None
    signal: str | None
    error: CodeError | None
    stdout: StreamView
    stderr: StreamView
    displays: tuple[Display, ...]
    displays_dropped: int
    artifacts: tuple[ArtifactView, ...] = Field(description="The first ones, as many as fit into a page.")
    artifacts_complete: bool = Field(True, description="false: there are more artifacts than these.")
    images: tuple[ImageView, ...]
    timings: RunTimings
    report: Report | None = None
    network_refusals: tuple[str, ...] = Field((), description="What the network policy refused meanwhile, and why.")
    missing_module: MissingModule | None = Field(None, description="What the code could not import, if that ended it.")
    service_loss: str | None = Field(None, description="How the template's service ended, if it has.")
    expires_in_s: float | None = Field(None, description="Seconds until the sandbox ends unless it is used.")

    @property
    def log_needed(self) -> bool:
        """Whether output is missing here that only the run's log has."""
        return any(stream.spill is None and stream.log_offset is not None for stream in (self.stdout, self.stderr))


class SentInput(View):
    """What was sent to the standard input of a run."""

    sandbox_id: str
    run_id: str
    sent_bytes: int
    closed: bool = Field(description="The run finds the end of its input after this.")


class OutputPage(View):
    """A part of a run's output log."""

    text: str
    start: int
    end: int
    size: int = Field(description="Size of the whole log so far.")


class RunProgress(View):
    """How far a run has got, and a part of its output."""

    sandbox_id: str
    run_id: str
    page: OutputPage
    elapsed_s: float
    left_s: float = Field(description="Seconds until its time limit.")
    live_full: bool = Field(description="A stream is longer than what is sent while the run is active.")
    result: RunView | None = Field(None, description="null while the run is active, or if it was lost.")
    error: ErrorView | None = Field(None, description="Why there will be no result.")
