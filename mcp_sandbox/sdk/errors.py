"""Errors that only clients have, and how a server's problem becomes the error that the service raised."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from mcp_sandbox.errors import SandboxError, error_types
from mcp_sandbox.rest import errors as _rest_errors  # noqa: F401 - defines the errors that only REST has

MAX_DETAIL_CHARS = 500  # of an answer that no server of ours gives


@dataclass(eq=False)
class NoConnection(SandboxError):
    """No server answers at the address, or the connection to it was lost."""

    code = "no_connection"
    sentence = "The server at {url} cannot be reached: {reason}."
    hint = "Start it with `mcp-sandbox serve`, or use base_url=None, which needs no server."
    url: str
    reason: str


@dataclass(eq=False)
class TokenRefused(SandboxError):
    """The server needs a token and got none, or one that is not valid for the request."""

    code = "token_refused"
    sentence = "The server at {url} refuses the request: {reason}."
    hint = "Pass a token that `mcp-sandbox token create` has printed, or set MCP_SANDBOX_TOKEN."
    url: str
    reason: str


@dataclass(eq=False)
class NotOffered(SandboxError):
    """The server has no such operation."""

    code = "not_offered"
    sentence = "The server at {url} does not offer {request}."
    hint = 'Check the address. Operators choose what is offered: forks and pauses need toolsets = ["advanced"].'
    url: str
    request: str


@dataclass(eq=False)
class UnexpectedAnswer(SandboxError):
    """The server answered with an error that this version does not know."""

    code = "unexpected_answer"
    sentence = "The server at {url} answered with status {status}: {detail}"
    url: str
    status: int
    detail: str


def error_of(url: str, request: str, status: int, body: bytes) -> SandboxError:
    """Return the error that an answer with this status means."""
    problem = _problem(body)
    error = rebuilt(problem)
    if error is not None:
        return error
    said = str(problem.get("detail") or problem.get("title") or body[:MAX_DETAIL_CHARS].decode(errors="replace"))
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) and "code" not in problem:
        return hinted(TokenRefused(url, said.rstrip(".")))
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and not problem.get("code"):
        return hinted(NotOffered(url, request))
    return hinted(UnexpectedAnswer(url, status, said), problem.get("hint"))


def rebuilt(problem: dict[str, Any]) -> SandboxError | None:
    """Return the error that the service raised; None if this version has no such error."""
    kind = {kind.code: kind for kind in error_types()}.get(str(problem.get("code")))
    if kind is None:
        return None
    try:
        return hinted(kind(**problem["fields"]), problem.get("hint"))
    except (KeyError, TypeError):  # a server of another version, with other fields
        return None


def hinted(error: SandboxError, hint: object = None) -> SandboxError:
    """Return the error with its next step, which a traceback shows, too."""
    if hint:
        error.hint = str(hint)
    if error.hint:
        error.add_note(error.hint)
    return error


def _problem(body: bytes) -> dict[str, Any]:
    try:
        problem = json.loads(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}
