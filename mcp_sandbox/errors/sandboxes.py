"""Errors of sandboxes and their runs."""

from dataclasses import dataclass, field

from mcp_sandbox.errors.base import SandboxError


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
