"""Errors in the arguments of a request."""

from dataclasses import dataclass

from mcp_sandbox.errors.base import SandboxError


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
