"""Errors of limits in the settings."""

from dataclasses import dataclass

from mcp_sandbox.errors.base import SandboxError


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
