"""An error as every face sees it, and the next step that a face adds."""

from collections.abc import Mapping
from string import Formatter
from typing import Any, Self

from pydantic import Field

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.views.base import View


class ErrorView(View):
    """An error: a stable code, a sentence, and the values in it."""

    code: str
    message: str = Field(description="One or two sentences without a next step, which depends on the face.")
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: SandboxError) -> Self:
        return cls(code=error.code, message=str(error), fields=error.fields)


def with_next_step(error: SandboxError | ErrorView, next_steps: Mapping[str, tuple[str, ...]]) -> str:
    """Return the error's sentence and a face's next step. Advice that needs a field the error lacks is left out."""
    view = error if isinstance(error, ErrorView) else ErrorView.of(error)
    known = {name for name, value in view.fields.items() if value is not None}
    steps = [step for step in next_steps[view.code] if _placeholders(step) <= known]
    separator = "\n" if "\n" in view.message else " "  # after a list of problems, the step has its own line
    return separator.join([view.message, *(step.format(**view.fields) for step in steps)])


def _placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}
