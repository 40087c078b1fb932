"""Calls of a handler: what is asked for, and what the machine is told besides."""

from collections.abc import Mapping
from typing import Any

from guest.protocol import encode_json
from mcp_sandbox.errors import BadRequest, InputTooLarge, WrongLanguage
from mcp_sandbox.runs.results import RunRequest
from templates.model import Template

LIMITS_BYTES = 100  # what `with_limits` adds, at most


def invocation(handler: str, event: object, context: Mapping[str, object] | None) -> dict[str, Any]:
    """The options of a run that calls `handler(event, context)` when its code is through."""
    return {"handler": handler, "event": event, "context": dict(context or {})}


def check_invocation(request: RunRequest, max_bytes: int) -> None:
    """See that a handler can be called as asked, as far as that can be known before there is a sandbox.

    Raises:
        BadRequest: it cannot.
    """
    options = request.options or {}
    if not request.code.strip() and request.sandbox_id is None:
        raise BadRequest(
            "The code is empty. Give the source that defines the handler, or the sandbox_id of a sandbox where an "
            "earlier run defined it."
        )
    if not str(options["handler"]).isidentifier():
        raise BadRequest("handler must be the name of a function that the code defines, such as 'handler'.")
    try:
        data = encode_json(dict(options))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"event and context must be JSON: {error}.") from None
    if len(request.code.encode(errors="replace")) + len(data) + LIMITS_BYTES > max_bytes:
        raise InputTooLarge(f"Code, event and context have more than {max_bytes:,} bytes together.")


def check_language(template: Template) -> None:
    """See that sandboxes of `template` have handlers.

    Raises:
        BadRequest: they have not.
    """
    if template.language != "python":
        raise WrongLanguage(f"Only Python has handlers, and template {template.name!r} is for {template.language}.")


def with_limits(options: Mapping[str, Any] | None, template: Template, timeout_s: float) -> dict[str, Any]:
    """The options with what a handler may ask its context for."""
    return {**(options or {}), "timeout_s": timeout_s, "memory_mb": template.machine.memory_mb}
