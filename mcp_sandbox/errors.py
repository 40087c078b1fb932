"""Everything that can go wrong with a sandbox, as data: a stable code, typed fields and one plain sentence.

The sentence names no tool and no command. Each face adds the next step in its own words (`tools/next_steps.py`,
`commands/next_steps.py`, `rest/next_steps.py`). docs/errors.md lists every code with each face's words.

SandboxError
├── SandboxNotFound           the owner has no such sandbox
│   ├── SandboxClosed         it was closed
│   └── SandboxExpired        it was idle for too long or reached its maximum age
├── RunNotFound               the sandbox never had such a run
│   └── RunResultDropped      its result is no longer kept
├── SandboxBusy               code, or any run, is active in the sandbox
├── StdinClosed               the run takes no input
├── StdinFull                 the run does not read its input
├── SandboxChanging           the sandbox is being forked, paused or resumed
├── SandboxPaused             the sandbox has no machine until it is resumed
├── CannotFreeze              this driver's machines cannot be forked or paused
├── StateLost                 the saved state of a machine is gone or damaged
├── MachineLost               the sandbox's machine ended while in use
├── RunLost                   the machine of a one-off run ended before there was a result
│   └── RunNotStarted         it ended before it received the code
├── RunRefused                the machine refused to run the code
├── StartFailed               a machine could not be started, frozen or resumed
├── NotUnique                 a restored machine did not get its own identity
├── ClockSkew                 a restored machine's clock could not be set
├── PooledMachineLost         a machine ended while it waited in the pool
├── TemplateNotBuilt          the template has no build for this host
├── TemplateDamaged           files of the template's build have changed since it was built
├── UnknownTemplate           no template has this name
├── UnusableTemplate          template.toml has errors
├── HostNotReady              this host cannot run machines as configured
├── NoHost                    no host can run the machine that was asked for
├── HostLost                  a host is gone, and the machines that were on it
├── DiskFull                  the host's disk is full
├── TooWeak                   the chosen driver isolates less than the settings require
├── NetworkRefused            a sandbox may not have the network that was asked for
│   ├── NetworkNotEnabled     the operator has not enabled the network mode
│   ├── NetworkNotInTemplate  the template's sandboxes may not have the network mode
│   ├── NetworkUnsupported    the driver has no such network mode on this host
│   └── DomainNotAllowed      a domain is outside of what the operator allows
├── LimitReached              a limit in the settings refuses the request
│   ├── SandboxLimit          too many sandboxes, or too much memory; the owner can make room
│   ├── QueueTimeout          no room became free in time
│   ├── NeverFits             the request is larger than the whole limit
│   ├── RunLimit              too many active runs
│   └── PausedLimit           too many paused sandboxes
├── BadRequest                an argument is wrong
│   ├── InputTooLarge         code or input is longer than a request can carry
│   └── WrongLanguage         the template's language does not support the option
├── WebUnavailable            the machine that reaches the web could not be started
├── FetchError                an address could not be fetched
│   ├── FetchFailed           for another reason than those below
│   ├── FetchDns              its name cannot be resolved
│   ├── FetchTls              there is no secure connection
│   ├── FetchRefused          the network policy refuses it
│   ├── FetchTooLarge         it is larger than a limit
│   ├── FetchTimeout          it took too long
│   ├── FetchHttpStatus       the server answered with an error
│   └── FetchRobots           robots.txt of the site forbids it
├── ArtifactNotFound          what was fetched is not kept, or belongs to another owner
├── SearchNotSetUp            no web search provider is set up
├── SearchFailed              no web search provider answered
├── HostDirNotFound           the operator opened no directory of the host with this name
├── HostDirReadOnly           nothing may be copied to this directory of the host
├── HostFileFailed            a file of the host cannot be copied, or not be written
└── FileError                 a file operation in the sandbox failed
    ├── FileNotFound          nothing is at the path
    ├── FileNotPermitted      the sandbox's user may not access it
    ├── FileTooLarge          it is larger than a limit
    ├── WrongFileKind         it is a directory where a file is needed, or the reverse
    ├── SandboxDiskFull       the sandbox's own disk is full
    ├── FileTimeout           the sandbox did not answer in time
    └── FileRefused           the sandbox refused for another reason
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

MAX_DOMAINS = 50  # that an error names


@dataclass(eq=False)
class SandboxError(Exception):
    """Base of all errors that a caller can get. Only subclasses are raised."""

    code: ClassVar[str] = "sandbox_error"
    sentence: ClassVar[str] = ""  # formatted with the fields
    hint = ""  # the next step, in errors that the SDK raises; no field, because it depends on the face

    def __str__(self) -> str:
        return self.sentence.format(**self.fields)

    @property
    def fields(self) -> dict[str, Any]:
        """The typed fields, ready to be serialised."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def error_types(base: type[SandboxError] = SandboxError) -> Iterator[type[SandboxError]]:
    """Yield every error class below `base` that has been imported."""
    for kind in base.__subclasses__():
        yield kind
        yield from error_types(kind)


# -- sandboxes and runs ------------------------------------------------------------------------------------


@dataclass(eq=False)
class SandboxNotFound(SandboxError):
    """The sandbox does not exist or belongs to another owner; the answer is the same."""

    code = "sandbox_not_found"
    sentence = "Sandbox {sandbox_id!r} does not exist."
    sandbox_id: str


@dataclass(eq=False)
class SandboxClosed(SandboxNotFound):
    """The sandbox was closed, by its owner unless a reason is given."""

    code = "sandbox_closed"
    reason: str = ""

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"Sandbox {self.sandbox_id!r} was closed{why}; its variables and files are gone."


@dataclass(eq=False)
class SandboxExpired(SandboxNotFound):
    """The sandbox was idle for too long or reached its maximum age."""

    code = "sandbox_expired"
    sentence = "Sandbox {sandbox_id!r} expired: {reason}; its variables and files are gone."
    reason: str


@dataclass(eq=False)
class RunNotFound(SandboxError):
    """The sandbox has no run with this id."""

    code = "run_not_found"
    sentence = "Sandbox {sandbox_id!r} has no run {run_id!r}."
    sandbox_id: str
    run_id: str


@dataclass(eq=False)
class RunResultDropped(RunNotFound):
    """The run is over and its result is no longer kept."""

    code = "run_result_dropped"
    sentence = (
        "The result of {run_id!r} in sandbox {sandbox_id!r} is not kept: a sandbox keeps its last {kept} results of "
        "background runs and of runs with omitted output, unless they are too large."
    )
    kept: int


@dataclass(eq=False)
class SandboxBusy(SandboxError):
    """Code is active in the sandbox, or any run if it is to be forked or paused."""

    code = "sandbox_busy"
    sandbox_id: str
    run_id: str
    elapsed_s: float
    others: list[str] = field(default_factory=list)  # further active runs

    def __str__(self) -> str:
        also = f" Also active: {', '.join(self.others)}." if self.others else ""
        return f"Sandbox {self.sandbox_id!r} is busy: {self.run_id} has been running for {self.elapsed_s:.0f} s.{also}"


@dataclass(eq=False)
class StdinClosed(SandboxError):
    """The run takes no input."""

    code = "stdin_closed"
    sentence = "{run_id} in sandbox {sandbox_id!r} takes no input: {reason}."
    sandbox_id: str
    run_id: str
    reason: str


@dataclass(eq=False)
class StdinFull(SandboxError):
    """The run does not read its input, so not all of it was taken."""

    code = "stdin_full"
    sentence = "{run_id} in sandbox {sandbox_id!r} does not read its input: {taken} of {size} bytes were taken."
    sandbox_id: str
    run_id: str
    taken: int
    size: int


@dataclass(eq=False)
class SandboxChanging(SandboxError):
    """The sandbox is being forked, paused or resumed."""

    code = "sandbox_changing"
    sentence = "Sandbox {sandbox_id!r} is busy: it is being forked, paused or resumed."
    sandbox_id: str


@dataclass(eq=False)
class TerminalRefused(SandboxError):
    """The sandbox opened no terminal."""

    code = "terminal_refused"
    sentence = "Sandbox {sandbox_id!r} opened no terminal: {reason}."
    sandbox_id: str
    reason: str


@dataclass(eq=False)
class PortRefused(SandboxError):
    """There is no connection to a port of the sandbox, or no longer."""

    code = "port_refused"
    sentence = "No connection to port {port} of sandbox {sandbox_id!r}: {reason}."
    sandbox_id: str
    port: int
    reason: str


@dataclass(eq=False)
class TerminalClosed(SandboxError):
    """The terminal was closed because the sandbox was forked or paused."""

    code = "terminal_closed"
    sentence = "The terminal was closed: sandbox {sandbox_id!r} was forked or paused."
    sandbox_id: str


@dataclass(eq=False)
class SandboxPaused(SandboxError):
    """The sandbox has no machine until it is resumed."""

    code = "sandbox_paused"
    sentence = "Sandbox {sandbox_id!r} is paused."
    sandbox_id: str


@dataclass(eq=False)
class CannotFreeze(SandboxError):
    """The driver takes no snapshots, so its sandboxes can be neither forked nor paused."""

    code = "cannot_freeze"
    sentence = "Driver {driver} takes no snapshots, so its sandboxes cannot be forked or paused."
    driver: str


@dataclass(eq=False)
class StateLost(SandboxError):
    """The saved state of a machine is gone or damaged."""

    code = "state_lost"
    sentence = "The saved state of the sandbox cannot be restored: {reason}."
    reason: str


@dataclass(eq=False)
class MachineLost(SandboxError):
    """The sandbox's machine ended, or broke the protocol, while it was in use."""

    code = "machine_lost"
    sentence = "Sandbox {sandbox_id!r} lost its machine ({reason}). Its variables and files are gone."
    sandbox_id: str
    reason: str
    run_id: str | None = None  # the run that was active, if its output can still be read


@dataclass(eq=False)
class RunLost(SandboxError):
    """The machine of a one-off run ended before there was a result."""

    code = "run_lost"
    sentence = "The run has no result: its machine ended ({reason})."
    sandbox_id: str
    reason: str
    run_id: str | None = None


@dataclass(eq=False)
class RunNotStarted(RunLost):
    """The machine of a one-off run ended before it received the code, so a retry repeats nothing."""

    code = "run_not_started"


@dataclass(eq=False)
class RunRefused(SandboxError):
    """The machine refused to run the code."""

    code = "run_refused"
    sentence = "The sandbox could not run the code: {reason}."
    reason: str


# -- machines ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StartFailed(SandboxError):
    """A machine could not be started, frozen or resumed."""

    code = "start_failed"
    sentence = "The sandbox could not be {action}: {reason}."
    reason: str
    action: str = "started"


@dataclass(eq=False)
class NotUnique(SandboxError):
    """A restored machine did not get its own identity, so it was discarded."""

    code = "machine_not_unique"
    sentence = "The new machine did not get its own {what}, so it was discarded."
    what: str


@dataclass(eq=False)
class ClockSkew(SandboxError):
    """A restored machine's clock could not be set, so it was discarded."""

    code = "machine_clock_skew"
    sentence = "The new machine's clock is off by {skew_s:.1f} s, so it was discarded."
    skew_s: float


@dataclass(eq=False)
class PooledMachineLost(SandboxError):
    """A machine ended while it waited in the pool."""

    code = "pooled_machine_lost"
    sentence = "A pooled machine ended: {reason}."
    reason: str


# -- templates and the host --------------------------------------------------------------------------------


@dataclass(eq=False)
class TemplateNotBuilt(SandboxError):
    """The template has no build for this host and driver."""

    code = "template_not_built"
    sentence = "Template {template!r} is not built on this host."
    template: str


@dataclass(eq=False)
class TemplateDamaged(SandboxError):
    """Files of the template's build are damaged, so its machines cannot start."""

    code = "template_damaged"
    sentence = "The build of template {template!r} is damaged ({part}), so its machines cannot start."
    template: str
    part: str


@dataclass(eq=False)
class UnknownTemplate(SandboxError):
    """No template has this name."""

    code = "template_not_found"
    template: str
    known: list[str]

    def __str__(self) -> str:
        return f"There is no template {self.template!r}. Choose one of: {', '.join(self.known) or '(none)'}."


@dataclass(eq=False)
class UnusableTemplate(SandboxError):
    """The template's template.toml has errors; the problem has one line for each."""

    code = "template_invalid"
    sentence = "Template {template!r} has errors in template.toml:\n{problem}"
    template: str
    problem: str


@dataclass(eq=False)
class HostNotReady(SandboxError):
    """This host cannot run machines as configured."""

    code = "host_not_ready"
    sentence = "This host cannot start sandboxes: {reason}."
    reason: str
    fix: str | None = None


@dataclass(eq=False)
class NoHost(SandboxError):
    """No host can run the machine that was asked for."""

    code = "no_host"
    sentence = "No host can run this sandbox: {reason}."
    reason: str


@dataclass(eq=False)
class NetworkRefused(SandboxError):
    """A sandbox may not have the network that was asked for. Only subclasses are raised."""

    code = "network_refused"


@dataclass(eq=False)
class NetworkNotEnabled(NetworkRefused):
    """The operator has not enabled the network mode that was asked for."""

    code = "network_not_enabled"
    sentence = "The operator has not enabled network mode {mode} for sandboxes."
    mode: str
    setting: str  # what would enable it


@dataclass(eq=False)
class NetworkNotInTemplate(NetworkRefused):
    """The template's sandboxes may not have the network mode that was asked for."""

    code = "network_not_in_template"
    sentence = "Sandboxes of template {template!r} have at most network mode {most}, not {mode}."
    template: str
    mode: str
    most: str


@dataclass(eq=False)
class NetworkUnsupported(NetworkRefused):
    """The driver has no such network mode on this host."""

    code = "network_unsupported"
    sentence = "Driver {driver} has no network mode {mode} on this host."
    driver: str
    mode: str


@dataclass(eq=False)
class DomainNotAllowed(NetworkRefused):
    """A domain is outside of what the operator allows."""

    code = "domain_not_allowed"
    domain: str
    allowed: list[str]

    def __str__(self) -> str:
        shown = ", ".join(self.allowed[:MAX_DOMAINS]) + (", …" if len(self.allowed) > MAX_DOMAINS else "")
        return f"The operator does not allow {self.domain!r}. Allowed domains: {shown}."


@dataclass(eq=False)
class HostLost(SandboxError):
    """A host is gone, and with it the machines and saved states that were on it."""

    code = "host_lost"
    sentence = "Host {host} was lost: {reason}."
    host: str
    reason: str


@dataclass(eq=False)
class DiskFull(SandboxError):
    """The host's disk is full, or its memory where files are kept in memory."""

    code = "host_disk_full"
    sentence = "The sandbox could not be {action}: the server's disk is full."
    action: str


@dataclass(eq=False)
class TooWeak(SandboxError):
    """The chosen driver isolates less than the settings require."""

    code = "isolation_too_weak"
    sentence = "Driver {driver} has isolation level {isolation}, but min_isolation = {least} requires more."
    driver: str
    isolation: str
    least: str


# -- limits ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LimitReached(SandboxError):
    """A limit in the settings refuses the request. Only subclasses are raised."""

    code = "limit_reached"
    sentence = "The limit {setting} = {value} is reached."
    setting: str
    value: int


@dataclass(eq=False)
class SandboxLimit(LimitReached):
    """There are too many sandboxes or they use too much memory, and only the owner can make room."""

    code = "sandbox_limit_reached"


@dataclass(eq=False)
class QueueTimeout(LimitReached):
    """No room became free in time; other owners hold it."""

    code = "queue_timeout"
    sentence = "The limit {setting} = {value} is reached, and no room became free within {waited_s:g} s."
    waited_s: float


@dataclass(eq=False)
class NeverFits(LimitReached):
    """The request is larger than the whole limit."""

    code = "never_fits"
    sentence = "The limit {setting} = {value} never has room for {count} sandbox(es) of {memory_mb} MB at once."
    count: int
    memory_mb: int


@dataclass(eq=False)
class RunLimit(LimitReached):
    """The owner or the sandbox has too many active runs."""

    code = "run_limit_reached"


@dataclass(eq=False)
class PausedLimit(LimitReached):
    """There are too many paused sandboxes."""

    code = "paused_limit_reached"


# -- requests ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class BadRequest(SandboxError):
    """An argument is wrong; nothing was done. The problem is a whole sentence that says what is expected."""

    code = "bad_request"
    sentence = "{problem}"
    problem: str


@dataclass(eq=False)
class InputTooLarge(BadRequest):
    """Code or input is longer than a request can carry."""

    code = "input_too_large"


@dataclass(eq=False)
class WrongLanguage(BadRequest):
    """The template's language does not support what was asked for."""

    code = "wrong_language"


# -- the web -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class WebUnavailable(SandboxError):
    """The machine that reaches the web could not be started."""

    code = "web_unavailable"
    sentence = "The web cannot be reached: {reason}."
    reason: str


@dataclass(eq=False)
class FetchError(SandboxError):
    """An address could not be fetched. Only subclasses are raised."""

    code = "fetch_error"
    url: str


@dataclass(eq=False)
class FetchFailed(FetchError):
    """An address could not be fetched, for another reason than those below."""

    code = "fetch_failed"
    sentence = "The address {url} could not be fetched: {reason}."
    reason: str


@dataclass(eq=False)
class FetchDns(FetchError):
    """The name of the host cannot be resolved."""

    code = "fetch_dns"
    sentence = "The address {url} could not be fetched: the name {host} cannot be resolved."
    host: str


@dataclass(eq=False)
class FetchTls(FetchError):
    """There is no secure connection to the server."""

    code = "fetch_tls"
    sentence = "The address {url} could not be fetched: there is no secure connection, {reason}."
    reason: str


@dataclass(eq=False)
class FetchRefused(FetchError):
    """The network policy of this server refuses the address, or one that it redirects to."""

    code = "fetch_refused"
    sentence = "The address {url} was not fetched: it, or an address it redirects to, is refused by the rule {rule}."
    rule: str


@dataclass(eq=False)
class FetchTooLarge(FetchError):
    """The download is larger than a limit, possibly only when decompressed."""

    code = "fetch_too_large"
    sentence = "The address {url} was not fetched: it has more than {limit:,} bytes."
    limit: int


@dataclass(eq=False)
class FetchTimeout(FetchError):
    """The download took too long."""

    code = "fetch_timeout"
    sentence = "The address {url} was not fetched: it took longer than {limit_s:g} s."
    limit_s: float


@dataclass(eq=False)
class FetchHttpStatus(FetchError):
    """The server answered with an error."""

    code = "fetch_http_status"
    sentence = "The address {url} could not be fetched: the server answered with status {status}."
    status: int


@dataclass(eq=False)
class FetchRobots(FetchError):
    """The robots.txt of the site does not allow to fetch the address."""

    code = "fetch_robots"
    sentence = "The address {url} was not fetched: robots.txt of the site does not allow it."


@dataclass(eq=False)
class ArtifactNotFound(SandboxError):
    """What was fetched is not kept any more, or belongs to another owner; the answer is the same."""

    code = "artifact_not_found"
    sentence = "The artifact {artifact_id!r} does not exist, or it is not kept any more."
    artifact_id: str


@dataclass(eq=False)
class SearchNotSetUp(SandboxError):
    """No web search provider is set up."""

    code = "search_not_set_up"
    sentence = "No web search provider is set up."


@dataclass(eq=False)
class SearchFailed(SandboxError):
    """No web search provider answered; each error has an engine, a code and a message."""

    code = "search_failed"
    sentence = "No web search provider answered: {problems}."
    problems: str
    errors: list[dict[str, str]]


# -- files -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FileError(SandboxError):
    """A file operation in the sandbox failed. Only subclasses are raised."""

    code = "file_error"
    path: str


@dataclass(eq=False)
class FileNotFound(FileError):
    """Nothing is at the path."""

    code = "file_not_found"
    sentence = "{path} does not exist."


@dataclass(eq=False)
class FileNotPermitted(FileError):
    """The sandbox's user may not access the file."""

    code = "file_not_permitted"
    sentence = "{path} may not be accessed: {reason}."
    reason: str = "the sandbox's user may not do that"


@dataclass(eq=False)
class FileTooLarge(FileError):
    """The file is larger than a limit."""

    code = "file_too_large"
    sentence = "{path} has {size:,} bytes; at most {limit:,} are possible at once."
    size: int
    limit: int


@dataclass(eq=False)
class WrongFileKind(FileError):
    """The path leads to a directory where a file is needed, or the reverse."""

    code = "wrong_file_kind"
    sentence = "{path} is {kind}."
    kind: str  # "a directory", "not a regular file"


@dataclass(eq=False)
class SandboxDiskFull(FileError):
    """The sandbox's own disk is full."""

    code = "sandbox_disk_full"
    sentence = "{path} was not written: the sandbox's disk is full."


@dataclass(eq=False)
class FileTimeout(FileError):
    """The sandbox did not answer in time."""

    code = "file_timeout"
    sentence = "{path}: the sandbox did not answer within {waited_s:g} s; it may be busy."
    waited_s: float


@dataclass(eq=False)
class FileRefused(FileError):
    """The sandbox refused the file operation for another reason."""

    code = "file_refused"
    sentence = "{path}: the sandbox refused the operation: {reason}."
    reason: str


# -- directories of the host -------------------------------------------------------------------------------


@dataclass(eq=False)
class HostDirNotFound(SandboxError):
    """The operator opened no directory of the host with this name."""

    code = "host_dir_not_found"
    name: str
    known: list[str]

    def __str__(self) -> str:
        return f"There is no directory {self.name!r} on the host. Paths begin with one of: {', '.join(self.known)}."


@dataclass(eq=False)
class HostDirReadOnly(SandboxError):
    """The operator opened this directory of the host for reading only."""

    code = "host_dir_read_only"
    sentence = "Nothing can be copied to {name!r}: the operator opened it for reading only."
    name: str


@dataclass(eq=False)
class HostFileFailed(SandboxError):
    """A file of the host cannot be read or written; nothing was copied."""

    code = "host_file_failed"
    sentence = "{path} on the host was not copied: {reason}."
    path: str  # below the name of its directory
    reason: str
