"""The life of a sandbox: its states, the legal moves between them, and how long it may last."""

from dataclasses import dataclass
from enum import StrEnum

from mcp_sandbox.config import LifetimeSettings
from mcp_sandbox.errors import (
    BadRequest,
    MachineLost,
    RunLost,
    RunNotStarted,
    SandboxClosed,
    SandboxError,
    SandboxExpired,
)
from mcp_sandbox.runs.running import LostRun


class State(StrEnum):
    """The state of a sandbox."""

    CREATING = "creating"  # waiting for a place or for its machine
    READY = "ready"
    RUNNING = "running"  # at least one run is active
    PAUSED = "paused"
    CLOSING = "closing"  # no longer usable; its machine is being torn down
    CLOSED = "closed"
    LOST = "lost"  # its machine ended unexpectedly


MOVES = {
    State.CREATING: frozenset({State.READY, State.CLOSING}),
    State.READY: frozenset({State.RUNNING, State.PAUSED, State.CLOSING, State.LOST}),
    State.RUNNING: frozenset({State.READY, State.CLOSING, State.LOST}),
    State.PAUSED: frozenset({State.READY, State.CLOSING, State.LOST}),
    State.CLOSING: frozenset({State.CLOSED}),
    State.CLOSED: frozenset[State](),
    State.LOST: frozenset[State](),
}
USABLE = frozenset({State.READY, State.RUNNING})
ALIVE = USABLE | {State.PAUSED}
OVER = frozenset({State.CLOSING, State.CLOSED, State.LOST})


class IllegalMove(RuntimeError):
    """A sandbox was moved to a state that its own state does not lead to: a bug."""


def moved(old: State, new: State) -> State:
    """Return the state `new`, which must be a legal move from `old`."""
    if new not in MOVES[old]:
        raise IllegalMove(f"a sandbox cannot move from {old} to {new}")
    return new


class End(StrEnum):
    """Why a sandbox ended."""

    CLOSED = "closed"  # by its owner or an operator, or because the server stopped
    EXPIRED = "expired"
    LOST = "lost"
    FAILED = "failed"  # it never started


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sandbox ended: all that is kept of it."""

    sandbox_id: str
    owner: str
    end: End
    reason: str = ""
    one_off: bool = False
    unused: bool = False  # its machine never received code
    lost_runs: tuple[LostRun, ...] = ()  # the runs that were active when the machine was lost, oldest first

    def error(self) -> SandboxError:
        """Return the error for a caller who wants to use the sandbox."""
        match self.end:
            case End.EXPIRED:
                return SandboxExpired(self.sandbox_id, self.reason)
            case End.LOST:
                kind = MachineLost if not self.one_off else RunNotStarted if self.unused else RunLost
                run_id = next((run.id for run in self.lost_runs if len(run.log)), None)
                return kind(self.sandbox_id, self.reason, run_id)
            case _:
                return SandboxClosed(self.sandbox_id, self.reason)


@dataclass(frozen=True, slots=True)
class Lifespan:
    """How long a sandbox may live: every use restarts the idle timeout, nothing extends its maximum age."""

    idle_s: float
    ttl_s: float

    def ends_at(self, created: float, idle_since: float) -> tuple[float, str]:
        """Return when the sandbox ends if nothing more happens, and why."""
        return min(
            self.too_old_at(created),
            (idle_since + self.idle_s, f"it was idle for {self.idle_s:g} s"),
        )

    def too_old_at(self, created: float) -> tuple[float, str]:
        """Return when the sandbox reaches its maximum age, and the reason to give then."""
        return created + self.ttl_s, f"it reached its maximum age of {self.ttl_s:g} s"


def lifespan(limits: LifetimeSettings, ttl_s: float | None, idle_s: float | None) -> Lifespan:
    """Return the requested lifespan, with the defaults of the settings.

    Raises:
        BadRequest: it exceeds the limits.
    """
    return Lifespan(
        idle_s=_within("idle_s", idle_s, limits.idle_s, limits.max_idle_s),
        ttl_s=_within("ttl_s", ttl_s, limits.max_age_s, limits.max_age_s),
    )


def _within(name: str, wanted: float | None, default: float, most: float) -> float:
    if wanted is None:
        return default
    if not 0 < wanted <= most:
        raise BadRequest(f"{name} must be greater than 0 and at most {most:g}.")
    return wanted
