"""Errors of machines."""

from dataclasses import dataclass

from mcp_sandbox.errors.base import SandboxError


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
