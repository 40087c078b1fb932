"""What the self-test found.

`mcp-sandbox selftest --json` prints a `Report`; its keys are the field names below and stay as they are.
"""

from enum import StrEnum

from pydantic import BaseModel

from vmm.types import Accel, Isolation

MAX_DETAIL_CHARS = 300  # part of it comes from a sandbox


class Verdict(StrEnum):
    """The outcome of a case."""

    HELD = "held"
    BROKEN = "broken"
    NOT_APPLICABLE = "not applicable"
    FAILED = "failed"  # the case could not be carried out


class Outcome(BaseModel):
    """What a case found."""

    verdict: Verdict
    detail: str = ""


class CaseResult(Outcome):
    """A case and its outcome."""

    topic: str
    name: str
    advice: str | None  # what to do; null if it held
    seconds: float


class Report(BaseModel):
    """All results, and what was tested."""

    template: str
    driver: str
    isolation: Isolation
    accel: Accel | None
    missing_protections: list[str]
    security: bool
    compat: bool
    passed: bool
    cases: list[CaseResult]


def held(detail: str) -> Outcome:
    """Return that a case held."""
    return Outcome(verdict=Verdict.HELD, detail=shown(detail))


def broken(detail: str) -> Outcome:
    """Return that a case is broken."""
    return Outcome(verdict=Verdict.BROKEN, detail=shown(detail))


def not_applicable(reason: str) -> Outcome:
    """Return that a case does not concern this driver or template."""
    return Outcome(verdict=Verdict.NOT_APPLICABLE, detail=reason)


def failed(reason: str) -> Outcome:
    """Return that a case could not be carried out."""
    return Outcome(verdict=Verdict.FAILED, detail=shown(reason))


def shown(text: str) -> str:
    """Return text from a sandbox as one short printable line."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * MAX_DETAIL_CHARS])
    return line if len(line) <= MAX_DETAIL_CHARS else f"{line[:MAX_DETAIL_CHARS]} …"
