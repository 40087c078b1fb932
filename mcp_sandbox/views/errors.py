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
    """Return the error's sentence and a face's next step."""
    view = error if isinstance(error, ErrorView) else ErrorView.of(error)
    separator = "\n" if "\n" in view.message else " "  # after a list of problems, the step has its own line
    return separator.join([view.message, *steps_for(view, next_steps)])


def steps_for(view: ErrorView, next_steps: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return a face's advice for an error. Advice that needs a field the error lacks is left out."""
    known = {name for name, value in view.fields.items() if value is not None}
    return [step.format(**view.fields) for step in next_steps[view.code] if _placeholders(step) <= known]


def _placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}
