"""Errors of this room.

TemplateError
├── UnknownTemplate   no template has that name; lists the names there are
├── InvalidTemplate   a template.toml has errors; names file, line, field and what to write instead
├── EntryInUse        a damaged entry cannot be replaced while machines use it
├── UnusableKernel    the guest kernel named in the settings cannot be used
├── UnreadableChoice  the file that names the chosen programs is damaged
└── BuildFailed       a build step failed; carries the step and the end of its log
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class TemplateError(Exception):
    """Base of all errors this room raises."""


class UnknownTemplate(TemplateError):
    """No template has that name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no template {name!r}; choose one of: {', '.join(known) or '(none)'}")
        self.name = name
        self.known = tuple(known)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a template.toml."""

    message: str  # what is wrong, or what to write instead
    field: str = ""  # like source.debian.wheels[0]; empty if the error is not about a field
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidTemplate(TemplateError):
    """A template.toml has errors. The message has one line for each."""

    def __init__(self, file: Path, *problems: Problem) -> None:
        self.file = file
        self.problems = problems
        super().__init__(
            "\n".join(f"{file}:{f'{problem.line}:' if problem.line else ''} {problem}" for problem in problems)
        )


class EntryInUse(TemplateError):
    """A damaged store entry cannot be replaced while machines use it."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"the damaged {kind} is in use; close the sandboxes and servers that use it, then build again")


class UnusableKernel(TemplateError):
    """The guest kernel named in the settings is missing or cannot be used."""


class UnreadableChoice(TemplateError):
    """The file that names the programs which the operator chose is damaged."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"{file} is damaged; remove it and run `mcp-sandbox setup --runsc` again, if you chose one")


class BuildFailed(TemplateError):
    """A build step failed. It left nothing but its log."""

    def __init__(self, step: str, reason: str, *, log_tail: str, log_path: Path) -> None:
        super().__init__(f"step {step!r} failed: {reason}")
        self.step = step
        self.reason = reason
        self.log_tail = log_tail
        self.log_path = log_path
