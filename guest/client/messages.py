"""What the host asks of an agent and what the agent answers: frozen values.

The fields of answers have the types of `guest.client.wire`, which `guest.client.parsing` checks them against.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from guest.client.reports import Report
from guest.client.wire import ExitCode, Flag, Number, Path, SignalName, Text, Whole, line
from guest.languages import LanguageName

RunKind = Literal["code", "command", "invoke"]
Stream = Literal["stdout", "stderr"]
Status = Literal["ok", "error", "interrupted", "killed", "exited"]
State = Literal["kept", "lost"]
Kind = Literal["file", "dir", "link", "other"]

MAX_NAME = 200  # characters of a name or a version
MAX_MESSAGE = 4000  # characters of an error message
MAX_LOSS = 600  # characters of how a service ended
MAX_LABEL = 120  # characters of a text in a chart
MAX_SERIES = 20  # of one chart
MAX_CHARTS = 20  # of one figure


@dataclass(frozen=True, slots=True)
class Hello:
    """Facts about an agent."""

    version: Whole  # of the protocol
    agent: Annotated[Text, line(MAX_NAME)]
    language: Annotated[Text, line(MAX_NAME)]
    language_version: Annotated[Text, line(MAX_NAME)]


@dataclass(frozen=True, slots=True)
class Device:
    """What is left to configure of a machine's network device."""

    resolvers: tuple[str, ...]  # name servers
    address: str | None = None  # such as "198.18.0.2/30"; None: the device is configured
    gateway: str | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """How much memory and how many CPUs code may use."""

    memory_mb: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What distinguishes one clone of a snapshot from all others."""

    hostname: str
    machine_id: str  # 32 hexadecimal digits
    entropy: bytes  # at least 32 bytes from the host's generator
    network: str = "none"  # the mode that the machine was leased with
    device: Device | None = None  # in mode "nat"
    size: Size | None = None  # if it is not the one that the machine was first started with
    reseed: bool = True  # also the generators of running code; not needed if no other machine has this state
    reseed_all: bool = False  # of these, not only the global ones but all that can be found


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The outcome of a refresh. False: the machine's kernel does not allow it (gVisor, containers)."""

    clock_skew_s: float  # guest minus host, after the clock was set
    entropy_credited: bool
    hostname_set: bool


class AgentState(BaseModel):
    """What a client needs besides the byte stream to take over an agent from another client.

    It is small and serialisable (`model_dump_json`): the other client may be in another process or on another host.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    hello: Hello
    refreshed: Refreshed | None
    last_id: Whole  # of the requests made so far
    unread: bytes  # received, but not a whole frame yet


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
    """How a machine prepares for its first caller."""

    language: LanguageName = "python"
    code: str = ""  # run in the language's kernel
    env: Mapping[str, str] = field(default_factory=dict)  # of every process in the machine
    service: Service | None = None
    user_namespaces: bool = False  # whether code may create namespaces, see `guest.seccomp`
    rehearsal: str = ""  # run at the end, and by `AgentClient.rehearse`


@dataclass(frozen=True, slots=True)
class RunCode:
    """Code to run, and how much of its output to send back."""

    code: str
    kind: RunKind = "code"  # code in the machine's language; a shell command; or code with a handler to call
    options: Mapping[str, Any] | None = None  # JSON whose meaning depends on the kind and the language
    keep_processes: bool = False  # those that it leaves running outlive it
    stdin_open: bool = False  # it reads what `Run.write` sends
    grace_s: float = 2.0  # between the interrupt and the kill when the run is stopped
    head_bytes: int = 64 * 1024  # of each stream, sent while the code runs
    tail_bytes: int = 16 * 1024  # of each stream, sent at the end if there was more
    max_display_bytes: int = 256 * 1024  # of everything shown by display() and last expressions


@dataclass(frozen=True, slots=True)
class Output:
    """Text that the code wrote. `gap_bytes` were left out right before it."""

    stream: Stream
    text: str
    gap_bytes: int = 0


Label = Annotated[Text, line(MAX_LABEL)]


@dataclass(frozen=True, slots=True)
class Series:
    """A series of a chart, and its number of points if that is known."""

    label: Label = ""
    points: Whole | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """What one chart shows. Texts that the code has not set are empty."""

    title: Label = ""
    type: Label = ""
    x_label: Label = ""
    y_label: Label = ""
    series: Annotated[tuple[Series, ...], Field(max_length=MAX_SERIES)] = ()


@dataclass(frozen=True, slots=True)
class Chart(Panel):
    """A chart, or a figure with several `charts`."""

    charts: Annotated[tuple[Panel, ...], Field(max_length=MAX_CHARTS)] = ()


@dataclass(frozen=True, slots=True)
class Display:
    """A value that the code showed: its forms by MIME type. Images and long forms are files; `files` names them."""

    data: dict[str, str]
    files: tuple[str, ...] = ()
    chart: Chart | None = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file in the outputs directory that the run created or changed."""

    path: Path
    size: Whole


@dataclass(frozen=True, slots=True)
class CodeError:
    """The exception that ended the code, or what killed its process."""

    name: Annotated[Text, line(MAX_NAME)]
    message: Annotated[Text, Field(max_length=MAX_MESSAGE)]
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class OutputTotals:
    """How much was written in all, and the files that hold it if not all was sent."""

    stdout_bytes: Whole
    stderr_bytes: Whole
    stdout_spill: Path | None = None
    stderr_spill: Path | None = None
    spill_complete: Flag = True  # False: the disk was full, or the output larger than a spill file may be
    displays_dropped: Whole = 0  # values shown beyond max_display_bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended. The last event of every run."""

    status: Status
    state: State
    exit_code: ExitCode | None
    signal: SignalName | None
    error: CodeError | None
    output: OutputTotals
    artifacts_complete: Flag = True  # False: the outputs directory has more files than the agent looks at
    service_loss: Annotated[Text, line(MAX_LOSS)] | None = (
        None  # how the machine's service ended, if it had one and it has
    )


Event = Output | Display | Artifact | Report | Finished


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of the machine's file system."""

    path: Path
    kind: Kind
    size: Whole
    mtime: Number


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Part of a file."""

    data: bytes
    size: Whole  # of the whole file
    eof: Flag


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries of a directory. `truncated`: there were more than asked for."""

    entries: tuple[FileInfo, ...]
    truncated: Flag
