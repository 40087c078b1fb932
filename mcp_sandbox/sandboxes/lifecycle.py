"""The life of a sandbox: its states, the moves between them, and how long it lasts."""

from dataclasses import dataclass
from enum import StrEnum

from mcp_sandbox.config import Settings
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
    """Where a sandbox is in its life."""

    CREATING = "creating"  # it waits for a place or for its machine
    READY = "ready"
    RUNNING = "running"  # code is being run in it
    PAUSED = "paused"
    CLOSING = "closing"  # nobody can use it any more, but its machine is still there
    CLOSED = "closed"
    LOST = "lost"  # its machine ended by itself


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
    """A sandbox was to go where it cannot: a fault of this program, not of whoever uses it."""


def moved(old: State, new: State) -> State:
    """The state `new`, which must be one that `old` leads to."""
    if new not in MOVES[old]:
        raise IllegalMove(f"a sandbox cannot go from {old} to {new}")
    return new


class End(StrEnum):
    """Why a sandbox ended."""

    CLOSED = "closed"  # by its owner, or because the server ends
    EXPIRED = "expired"
    LOST = "lost"
    FAILED = "failed"  # it never started


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sandbox ended: all that is remembered of it."""

    sandbox_id: str
    owner: str
    end: End
    reason: str = ""
    one_off: bool = False
    unused: bool = False  # it was never given any code
    lost_run: LostRun | None = None  # the run that was on when the machine was lost

    def error(self) -> SandboxError:
        """What to tell somebody who wants to use it."""
        match self.end:
            case End.EXPIRED:
                return SandboxExpired(self.sandbox_id, self.reason)
            case End.LOST:
                kind = MachineLost if not self.one_off else RunNotStarted if self.unused else RunLost
                run_id = self.lost_run.id if self.lost_run is not None and len(self.lost_run.log) else None
                return kind(self.sandbox_id, self.reason, run_id)
            case _:
                return SandboxClosed(self.sandbox_id, self.reason)


@dataclass(frozen=True, slots=True)
class Lifespan:
    """How long a sandbox may live. Use puts off the idle time-out, and nothing the end of its time to live."""

    idle_s: float
    ttl_s: float

    def ends_at(self, created: float, idle_since: float) -> tuple[float, str]:
        """When it ends if nothing more happens, and why."""
        return min(
            self.too_old_at(created),
            (idle_since + self.idle_s, f"it was idle for {self.idle_s:g} s"),
        )

    def too_old_at(self, created: float) -> tuple[float, str]:
        """When it ends whatever happens, and why."""
        return created + self.ttl_s, f"it was {self.ttl_s:g} s old"


def lifespan(settings: Settings, ttl_s: float | None, idle_s: float | None) -> Lifespan:
    """The lifespan asked for, or what the settings say.

    Raises:
        BadRequest: it is longer than the settings allow.
    """
    return Lifespan(
        idle_s=_within("idle_s", idle_s, settings.lifetime.idle_s, settings.lifetime.max_idle_s),
        ttl_s=_within("ttl_s", ttl_s, settings.lifetime.max_age_s, settings.lifetime.max_age_s),
    )


def _within(name: str, wanted: float | None, default: float, most: float) -> float:
    if wanted is None:
        return default
    if not 0 < wanted <= most:
        raise BadRequest(f"{name} must be greater than 0 and at most {most:g}.")
    return wanted
