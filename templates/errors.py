"""Everything that can go wrong with a template.

TemplateError
├── UnknownTemplate   no template has that name; says which there are
├── InvalidTemplate   a template.toml cannot be used; names file, field and what to do
├── UnusableKernel    the guest kernel the user named cannot be used
└── BuildFailed       a step of a build went wrong; carries the step and the end of its log
"""

from pathlib import Path


class TemplateError(Exception):
    """Base of all errors this room raises."""


class UnknownTemplate(TemplateError):
    """There is no template of that name."""


class InvalidTemplate(TemplateError):
    """A template.toml that cannot be used. The message has one line for each thing to mend."""


class UnusableKernel(TemplateError):
    """The kernel the user named is not there or cannot be used."""


class BuildFailed(TemplateError):
    """One step of a build failed. Nothing half-built is left, only the log."""

    def __init__(self, step: str, reason: str, *, log_tail: str, log_path: Path) -> None:
        super().__init__(f"step {step!r} failed: {reason}")
        self.step = step
        self.reason = reason
        self.log_tail = log_tail
        self.log_path = log_path
