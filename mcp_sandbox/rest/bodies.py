"""What requests carry: bodies and query parameters. The service checks what depends on its settings."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, RootModel, Tag

from guest.client.reports import MAX_CASES
from guest.places import WORKSPACE
from mcp_sandbox.runs import requests
from mcp_sandbox.runs.requests import (
    MAX_FLAGS,
    MIN_MEMORY_MB,
    SANITIZERS,
    CodeRun,
    CommandRun,
    HandlerRun,
    RunRequest,
    Variables,
)
from mcp_sandbox.sandboxes.forks import MAX_COPIES
from mcp_sandbox.views.sandboxes import Reseed
from mcp_sandbox.web.fetching import MAX_CHARS, FetchRequest, Format
from mcp_sandbox.web.searching import MAX_PAGE, MAX_QUERY, MAX_RESULTS
from vmm.types import NetworkMode
from websearch.pages import MAX_URL
from websearch.search import SearchRequest, TimeRange

PATH_CHARS = 4095
MAX_DOMAINS = 100
MAX_WAIT_S = 60.0  # the settings may have less


class Given(BaseModel):
    """Something that a client sends. A misspelled name is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Nothing(Given):
    """A request without parameters."""


# -- queries -----------------------------------------------------------------------------------------------


class PageQuery(Given):
    """Which page of a listing."""

    offset: int = Field(0, ge=0, lt=2**31, description="next_offset of the page before.")


class FolderQuery(Given):
    """Which directory."""

    path: str = Field(
        WORKSPACE, min_length=1, max_length=PATH_CHARS, description=f"Absolute, or relative to {WORKSPACE}."
    )


class DirectoryQuery(PageQuery, FolderQuery):
    """Which page of which directory."""

    recursive: bool = Field(False, description="Include subdirectories.")


class FileQuery(Given):
    """Which file."""

    path: str = Field(min_length=1, max_length=PATH_CHARS, description=f"Absolute, or relative to {WORKSPACE}.")


class OutputQuery(Given):
    """Which part of a run's output, and how long to wait for it."""

    offset: int = Field(0, ge=0, lt=2**63, description="Byte offset in the output.")
    wait_s: float = Field(
        0, ge=0, le=MAX_WAIT_S, description="Seconds to wait for the end of the run or a full page of output."
    )


class InputQuery(Given):
    """Whether more input follows."""

    close: bool = Field(False, description="The run finds the end of its input after this.")


class EventsQuery(Given):
    """Where a stream of events begins."""

    offset: int = Field(0, ge=0, lt=2**63, description="Byte offset in the output. Last-Event-ID takes precedence.")


# -- bodies ------------------------------------------------------------------------------------------------


class NewSandbox(Given):
    """The sandbox to create."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"template": "python-data-analysis", "idle_s": 600}]})

    template: str | None = Field(None, min_length=1, max_length=63, description="null: the default template.")
    ttl_s: float | None = Field(None, gt=0, description="Seconds after which it ends in any case.")
    idle_s: float | None = Field(None, gt=0, description="Seconds without use after which it ends.")
    memory_mb: int | None = Field(None, ge=1, description="Memory, files included; null: the template's.")
    cpus: int | None = Field(None, ge=1, description="null: the template's.")
    network: NetworkMode = Field(NetworkMode.NONE, description="What it may reach, if the operator allows it.")
    allow_domains: list[Annotated[str, Field(min_length=1, max_length=253)]] | None = Field(
        None, min_length=1, max_length=MAX_DOMAINS, description="With proxy: reach only these, such as *.example.com."
    )


class Fork(Given):
    """The copies to make."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"count": 2}]})

    count: int = Field(1, ge=1, le=MAX_COPIES)
    reseed: Reseed = Field(
        "global", description="Random generators that get a new state: those of modules, or all that can be found."
    )


class StartedRun(Given):
    """What all runs have in common."""

    template: str | None = Field(
        None, min_length=1, max_length=63, description="Of the one-off sandbox; only if the path names no sandbox."
    )
    timeout_s: float | None = Field(None, gt=0, description="Time limit in seconds.")
    background: bool = Field(False, description="Answer at once. A one-off sandbox is then kept.")


class KeepingRun(StartedRun):
    """A run that may leave something running."""

    keep_processes: bool = Field(False, description="Leave processes running that it started in the background.")
    stdin_open: bool = Field(False, description="Send its input while it runs, to its path /stdin. Implies background.")


class Case(Given):
    """A test case of a program."""

    stdin: str = ""
    expected: str | None = Field(None, description="Expected stdout; trailing whitespace is ignored.")


class CodeBody(KeepingRun):
    """Code in the language of the template."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"code": "print(6 * 7)"}]})

    kind: Literal["code"] = "code"
    code: str
    stdin: str | None = None
    cases: list[Case] | None = Field(None, min_length=1, max_length=MAX_CASES, description="C++, Go, Java: test cases.")
    case_timeout_s: float | None = Field(None, gt=0, description="Time limit of each case in seconds; default 10.")
    memory_limit_mb: int | None = Field(None, ge=MIN_MEMORY_MB, lt=2**31, description="C++, Go, Java: of the program.")
    flags: list[str] | None = Field(None, max_length=MAX_FLAGS, description="C++, Go, Java: added flags.")
    sanitize: list[Literal["address", "undefined", "thread"]] | None = Field(None, max_length=len(SANITIZERS))

    def request(self, owner: str, sandbox_id: str | None) -> RunRequest:
        """Return the run."""
        cases = None if self.cases is None else tuple(requests.Case(case.stdin, case.expected) for case in self.cases)
        return CodeRun(
            owner,
            self.code,
            sandbox_id,
            self.template,
            self.timeout_s,
            keep_processes=self.keep_processes,
            stdin_open=self.stdin_open,
            stdin=self.stdin,
            cases=cases,
            case_timeout_s=self.case_timeout_s,
            memory_limit_mb=self.memory_limit_mb,
            flags=None if self.flags is None else tuple(self.flags),
            sanitize=None if self.sanitize is None else tuple(self.sanitize),
        )


class CommandBody(KeepingRun):
    """A shell command."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"kind": "command", "command": "ls -l"}]})

    kind: Literal["command"]
    command: str
    cwd: str | None = Field(None, description="Directory of this command only.")
    env: Variables | None = Field(None, description="Of this command only.")
    stdin: str | None = None

    def request(self, owner: str, sandbox_id: str | None) -> RunRequest:
        """Return the run."""
        given = (owner, self.command, sandbox_id, self.template, self.timeout_s)
        return CommandRun(
            *given,
            keep_processes=self.keep_processes,
            stdin_open=self.stdin_open,
            cwd=self.cwd,
            env=self.env,
            stdin=self.stdin,
        )


class HandlerBody(StartedRun):
    """Code that defines an AWS-Lambda-style handler, and the event to call it with."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"kind": "invoke", "code": "def handler(event, context):\n    return event", "event": {"a": 1}}
            ]
        }
    )

    kind: Literal["invoke"]
    code: str = Field("", description="Empty: an earlier run has defined the handler.")
    event: JsonValue
    context: dict[str, JsonValue] | None = Field(None, description="Attributes of the handler's second argument.")
    handler: str = Field("handler", min_length=1, max_length=200, description="Name of the function.")

    def request(self, owner: str, sandbox_id: str | None) -> RunRequest:
        """Return the run."""
        given = (owner, self.code, sandbox_id, self.template, self.timeout_s)
        return HandlerRun(*given, event=self.event, context=self.context, handler=self.handler)


def _kind_of(body: Any) -> str | None:  # noqa: ANN401 - what the client sent
    return str(body.get("kind", "code")) if isinstance(body, dict) else getattr(body, "kind", None)


class RunBody(
    RootModel[
        Annotated[
            Annotated[CodeBody, Tag("code")]
            | Annotated[CommandBody, Tag("command")]
            | Annotated[HandlerBody, Tag("invoke")],
            Discriminator(_kind_of),
        ]
    ]
):
    """What to run: code (the default), a command, or a handler."""


class SearchBody(Given):
    """What to search the web for."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "gvisor erofs", "time_range": "year"}]})

    query: str = Field(min_length=1, max_length=MAX_QUERY)
    max_results: int = Field(8, ge=1, le=MAX_RESULTS, description="Most results of a page.")
    time_range: TimeRange | None = Field(None, description="Only pages of the last day, week, …")
    site: str | None = Field(None, max_length=253, description="Only pages of this domain and those below it.")
    page: int = Field(1, ge=1, le=MAX_PAGE, description="Page of the results.")
    language: str | None = Field(None, max_length=6, description="Language of the pages, such as en or pt-BR.")

    def request(self) -> SearchRequest:
        """Return the search."""
        return SearchRequest(**self.model_dump())


class FetchBody(Given):
    """The page to fetch, and which part of it to answer with."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"url": "https://example.org/", "format": "text"}]})

    url: str = Field(min_length=1, max_length=MAX_URL, description="Address, http:// or https://.")
    max_chars: int = Field(20_000, ge=1, le=MAX_CHARS, description="Most characters of the text.")
    start_index: int = Field(0, ge=0, lt=2**31, description="next_start_index of the part before.")
    format: Format = Field(
        "markdown", description="markdown or text: the main content; html: the whole page, cleaned; raw: its source."
    )
    sandbox_id: str | None = Field(
        None, min_length=1, max_length=64, description="Sandbox in which to save the whole download as a file."
    )

    def request(self) -> FetchRequest:
        """Return what to fetch."""
        return FetchRequest(**self.model_dump(exclude={"sandbox_id"}))
