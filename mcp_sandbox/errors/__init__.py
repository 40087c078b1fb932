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
├── TerminalRefused           the sandbox opened no terminal
├── TerminalClosed            the sandbox was forked or paused, which closes terminals
├── PortRefused               there is no connection to a port of the sandbox
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

from mcp_sandbox.errors.base import SandboxError, error_types
from mcp_sandbox.errors.files import (
    FileError,
    FileNotFound,
    FileNotPermitted,
    FileRefused,
    FileTimeout,
    FileTooLarge,
    HostDirNotFound,
    HostDirReadOnly,
    HostFileFailed,
    SandboxDiskFull,
    WrongFileKind,
)
from mcp_sandbox.errors.host import (
    DiskFull,
    DomainNotAllowed,
    HostLost,
    HostNotReady,
    NetworkNotEnabled,
    NetworkNotInTemplate,
    NetworkRefused,
    NetworkUnsupported,
    NoHost,
    TemplateDamaged,
    TemplateNotBuilt,
    TooWeak,
    UnknownTemplate,
    UnusableTemplate,
)
from mcp_sandbox.errors.limits import LimitReached, NeverFits, PausedLimit, QueueTimeout, RunLimit, SandboxLimit
from mcp_sandbox.errors.machines import ClockSkew, NotUnique, PooledMachineLost, StartFailed
from mcp_sandbox.errors.requests import BadRequest, InputTooLarge, WrongLanguage
from mcp_sandbox.errors.sandboxes import (
    CannotFreeze,
    MachineLost,
    PortRefused,
    RunLost,
    RunNotFound,
    RunNotStarted,
    RunRefused,
    RunResultDropped,
    SandboxBusy,
    SandboxChanging,
    SandboxClosed,
    SandboxExpired,
    SandboxNotFound,
    SandboxPaused,
    StateLost,
    StdinClosed,
    StdinFull,
    TerminalClosed,
    TerminalRefused,
)
from mcp_sandbox.errors.web import (
    ArtifactNotFound,
    FetchDns,
    FetchError,
    FetchFailed,
    FetchHttpStatus,
    FetchRefused,
    FetchRobots,
    FetchTimeout,
    FetchTls,
    FetchTooLarge,
    SearchFailed,
    SearchNotSetUp,
    WebUnavailable,
)

__all__ = [
    "ArtifactNotFound",
    "BadRequest",
    "CannotFreeze",
    "ClockSkew",
    "DiskFull",
    "DomainNotAllowed",
    "FetchDns",
    "FetchError",
    "FetchFailed",
    "FetchHttpStatus",
    "FetchRefused",
    "FetchRobots",
    "FetchTimeout",
    "FetchTls",
    "FetchTooLarge",
    "FileError",
    "FileNotFound",
    "FileNotPermitted",
    "FileRefused",
    "FileTimeout",
    "FileTooLarge",
    "HostDirNotFound",
    "HostDirReadOnly",
    "HostFileFailed",
    "HostLost",
    "HostNotReady",
    "InputTooLarge",
    "LimitReached",
    "MachineLost",
    "NetworkNotEnabled",
    "NetworkNotInTemplate",
    "NetworkRefused",
    "NetworkUnsupported",
    "NeverFits",
    "NoHost",
    "NotUnique",
    "PausedLimit",
    "PooledMachineLost",
    "PortRefused",
    "QueueTimeout",
    "RunLimit",
    "RunLost",
    "RunNotFound",
    "RunNotStarted",
    "RunRefused",
    "RunResultDropped",
    "SandboxBusy",
    "SandboxChanging",
    "SandboxClosed",
    "SandboxDiskFull",
    "SandboxError",
    "SandboxExpired",
    "SandboxLimit",
    "SandboxNotFound",
    "SandboxPaused",
    "SearchFailed",
    "SearchNotSetUp",
    "StartFailed",
    "StateLost",
    "StdinClosed",
    "StdinFull",
    "TemplateDamaged",
    "TemplateNotBuilt",
    "TerminalClosed",
    "TerminalRefused",
    "TooWeak",
    "UnknownTemplate",
    "UnusableTemplate",
    "WebUnavailable",
    "WrongFileKind",
    "WrongLanguage",
    "error_types",
]
