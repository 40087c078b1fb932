"""What the host asks of an agent and what it gets back: plain frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from guest.client.reports import Report

Language = Literal["python", "cpp", "go", "shell"]
RunKind = Literal["code", "command", "invoke"]
Stream = Literal["stdout", "stderr"]
Status = Literal["ok", "error", "interrupted", "killed", "exited"]
State = Literal["kept", "lost"]
Kind = Literal["file", "dir", "link", "other"]


@dataclass(frozen=True, slots=True)
class Hello:
    """Who answered."""

    protocol: int
    agent: str
    language: str
    language_version: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes one clone of a snapshot different from all others."""

    hostname: str
    machine_id: str  # 32 hexadecimal digits
    entropy: bytes  # at least 32 bytes from the host's generator
    reseed: bool = True  # the generators of running code, too; they may stay where no other machine has this state


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What came of a refresh. False: the machine's kernel does not allow it (gVisor, containers)."""

    clock_skew_s: float  # guest minus host, after the clock was set
    clock_settable: bool
    entropy_credited: bool
    hostname_set: bool


@dataclass(frozen=True, slots=True)
class Service:
    """A process that is started before the snapshot and alive in every clone."""

    command: tuple[str, ...]
    ready: tuple[str, ...]  # a command that succeeds once the process serves
    env: Mapping[str, str]
    cwd: str
    ready_timeout_s: float


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a machine does before its first caller comes."""

    language: Language = "python"
    code: str = ""  # run in the language's kernel
    env: Mapping[str, str] = field(default_factory=dict)  # of everything that runs in the machine
    service: Service | None = None


@dataclass(frozen=True, slots=True)
class RunCode:
    """Code to run, and how much of its output to send back."""

    code: str
    kind: RunKind = "code"  # code of the machine's language; a shell command; or code with a handler to call
    options: Mapping[str, Any] | None = None  # JSON that the kind, or the language, understands
    grace_s: float = 2.0  # between the interrupt and the kill, when the run is stopped
    head_bytes: int = 64 * 1024  # of each stream, sent while the code runs
    tail_bytes: int = 16 * 1024  # of each stream, sent at the end if there was more
    max_display_bytes: int = 256 * 1024  # of everything shown by display() and last expressions


@dataclass(frozen=True, slots=True)
class Output:
    """Text the code wrote. `gap_bytes` is how much was left out right before it."""

    stream: Stream
    text: str
    gap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Display:
    """A value shown: its forms by MIME type. Its images are files, `files` says which."""

    data: dict[str, str]
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file in the outputs directory that is new or changed since the run began."""

    path: str
    size: int
    mime_type: str


@dataclass(frozen=True, slots=True)
class CodeError:
    """The exception that ended the code, or what killed its process."""

    name: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class OutputTotals:
    """How much was written in all, and the files that hold it where not all was sent."""

    stdout_bytes: int
    stderr_bytes: int
    stdout_spill: str | None = None
    stderr_spill: str | None = None
    spill_complete: bool = True  # False: the disk was full, or the output larger than a spill file may be
    displays_dropped: int = 0  # values shown beyond max_display_bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended. The last event of every run."""

    status: Status
    state: State
    exit_code: int | None
    signal: str | None
    error: CodeError | None
    duration_s: float
    output: OutputTotals
    artifacts_complete: bool = True  # False: there are more files among the outputs than the agent looks at
    service_loss: str | None = None  # how the machine's service ended, if it had one and it has


Event = Output | Display | Artifact | Report | Finished


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of the machine's file system."""

    path: str
    kind: Kind
    size: int
    mtime: float


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Part of a file."""

    data: bytes
    size: int  # of the whole file
    eof: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory's entries. `truncated` when there were more than asked for."""

    entries: tuple[FileInfo, ...]
    truncated: bool


@dataclass(frozen=True, slots=True)
class GuestUsage:
    """What the machine itself says about its memory and disk, in bytes."""

    memory_total: int
    memory_available: int
    disk_total: int
    disk_free: int
