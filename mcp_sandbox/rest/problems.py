"""Errors as application/problem+json (RFC 9457), with the code, the fields and the next step of our own errors."""

from http import HTTPStatus
from typing import Any

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.rest.next_steps import NEXT_STEPS, STATUSES
from mcp_sandbox.views import ErrorView, View, steps_for

PROBLEM_TYPE = "application/problem+json"
CODE_URN = "urn:mcp-sandbox:error:"


class Problem(View):
    """Why there is no result, and what to do."""

    type: str = Field("about:blank", description=f"{CODE_URN} and the code, or about:blank.")
    title: str
    status: int
    detail: str = ""
    code: str | None = Field(None, description="Stable; docs/errors.md lists all of them. null: the request itself.")
    hint: str | None = Field(None, description="What to do next.")
    fields: dict[str, Any] = Field({}, description="The values in the detail.")


def problem_of(error: SandboxError | ErrorView) -> Problem:
    """Return an error of the service as a problem."""
    view = error if isinstance(error, ErrorView) else ErrorView.of(error)
    status = STATUSES[view.code]
    return Problem(
        type=f"{CODE_URN}{view.code}",
        title=view.code.replace("_", " ").capitalize(),
        status=status,
        detail=view.message,
        code=view.code,
        hint=" ".join(steps_for(view, NEXT_STEPS)) or None,
        fields=view.fields,
    )


def refusal(status: int, detail: str = "", headers: dict[str, str] | None = None) -> Response:
    """Return the answer to a request that HTTP itself refuses."""
    return answer_with(Problem(title=HTTPStatus(status).phrase, status=status, detail=detail), headers)


def answer_with(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """Return a problem as a response."""
    return Response(problem.model_dump_json(), problem.status, headers, PROBLEM_TYPE)


async def refused(_request: Request, error: Exception) -> Response:
    """Answer for Starlette: an unknown path, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, headers=dict(error.headers or {}))
