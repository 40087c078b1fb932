"""Errors of the commands that use a server."""

from dataclasses import dataclass

from mcp_sandbox.errors import SandboxError


@dataclass(eq=False)
class NoServer(SandboxError):
    """No server of this home serves HTTP, and no address was given."""

    code = "no_server"
    sentence = "No server of this home serves HTTP."


@dataclass(eq=False)
class BadUrl(SandboxError):
    """The address of a server cannot be one, or its token cannot."""

    code = "bad_url"
    sentence = "{reason}"
    reason: str


@dataclass(eq=False)
class ServerUnreachable(SandboxError):
    """The server could not be reached, or went away before it had answered."""

    code = "server_unreachable"
    sentence = "The server at {url} does not answer: {reason}."
    url: str
    reason: str


@dataclass(eq=False)
class RequestRefused(SandboxError):
    """The server refused the request. The reason has the server's own error and what to do about it."""

    code = "request_refused"
    sentence = "{reason}"
    reason: str
    problem: str | None = None  # the code of the server's error
    taken: int = 0  # bytes of input that a run has taken all the same


@dataclass(eq=False)
class CannotCopy(SandboxError):
    """Nothing can be copied from here to there."""

    code = "cannot_copy"
    sentence = "{reason}"
    reason: str


@dataclass(eq=False)
class CannotForward(SandboxError):
    """The port of this host that should lead to the sandbox cannot be used."""

    code = "cannot_forward"
    sentence = "Port {port} of this host cannot be used: {reason}."
    port: int
    reason: str


@dataclass(eq=False)
class NoTerminal(SandboxError):
    """The command needs a terminal to type in, and has none."""

    code = "no_terminal"
    sentence = "Standard input or output is not a terminal."


@dataclass(eq=False)
class NoActiveRun(SandboxError):
    """The sandbox has no active run, and the command names none."""

    code = "no_active_run"
    sentence = "No run is active in {sandbox_id}."
    sandbox_id: str
