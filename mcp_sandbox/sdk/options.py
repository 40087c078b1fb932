"""Optional arguments, which the blocking and the asynchronous classes share. The server checks them."""

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypedDict

TEMPLATE = "python-data-analysis"
BASE_URL = "http://127.0.0.1:8000"  # where `mcp-sandbox serve` listens unless told otherwise


class SandboxOptions(TypedDict, total=False):
    """Of a new sandbox."""

    ttl_s: float  # seconds after which it ends in any case
    idle_s: float  # seconds without use after which it ends
    memory_mb: int  # default: the template's
    cpus: int  # default: the template's
    network: Literal["none", "proxy", "nat"]
    allow_domains: Sequence[str]


class RunOptions(TypedDict, total=False):
    """Of every run."""

    timeout_s: float  # default: as long as the server allows
    stdin: str
    keep_processes: bool  # leave processes running that it started in the background


class Case(TypedDict):
    """A test case of a program: its input, and the output to expect."""

    stdin: str
    expected: NotRequired[str]


class CodeOptions(RunOptions, total=False):
    """Of code. All but the first three are for C++, Go and Java."""

    cases: Sequence[Case]
    case_timeout_s: float
    memory_limit_mb: int
    flags: Sequence[str]
    sanitize: Sequence[Literal["address", "undefined", "thread"]]


class CommandOptions(RunOptions, total=False):
    """Of a shell command."""

    cwd: str
    env: Mapping[str, str]


class SearchOptions(TypedDict, total=False):
    """Of a web search."""

    max_results: int
    time_range: Literal["day", "week", "month", "year"]
    site: str
    page: int
    language: str


class FetchOptions(TypedDict, total=False):
    """Of a page to fetch."""

    max_chars: int
    start_index: int
    format: Literal["markdown", "text", "html", "raw"]
