"""What a run has measured, as a machine reports it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from guest.client.wire import Path, SignalName, Text, Whole, check, line
from guest.errors import ProtocolError
from guest.protocol import decode_json

Phase = Literal["compile", "check", "run"]
Verdict = Literal[
    "passed",
    "wrong output",
    "ran",  # nothing was expected
    "time limit exceeded",
    "memory limit exceeded",
    "runtime error",
    "sanitizer finding",  # whatever the output and the exit code
    "not run",  # the run was stopped first
]
MAX_CASES = 100
MAX_REPORT_BYTES = 512 * 1024
MAX_COMMAND = 500  # characters of a compiler's command line; the caller knows the flags
MAX_NOTE = 500  # characters


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended and what it used."""

    exit_code: Whole | None
    signal: SignalName | None
    wall_ms: Whole
    cpu_ms: Whole
    peak_bytes: Whole | None  # None: this machine cannot tell


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One test case."""

    verdict: Verdict
    end: ProcessEnd | None
    stdout: Text  # its beginning
    stderr: Text  # its beginning
    diff: Text  # where the output differs from what was expected, shortened


@dataclass(frozen=True, slots=True)
class CompiledReport:
    """A run of code in a compiled language."""

    phase: Phase  # the last one reached; check: the code has no main, so it was compiled and not run
    command: Annotated[Text, line(MAX_COMMAND)]  # that compiled it
    compile_ms: Whole
    diagnostics: Text  # of the compiler, shortened
    warnings: Text  # of a checker besides the compiler, shortened
    note: Annotated[Text, Field(max_length=MAX_NOTE), line(MAX_NOTE)]  # what was changed in the code before compiling
    end: ProcessEnd | None  # of the program, if there were no cases
    cases: Annotated[tuple[CaseResult, ...], Field(max_length=MAX_CASES)] = ()
    kind: Literal["compiled"] = "compiled"


@dataclass(frozen=True, slots=True)
class HandlerReport:
    """A call of a handler."""

    result: Text | None  # JSON; None: the handler raised, or returned something that is not JSON
    result_bytes: Whole  # of all the JSON; `result` may be only its beginning
    result_file: Path | None  # holds all the JSON if `result` does not
    end: ProcessEnd  # its peak is an upper bound for the call
    least_peak_bytes: Whole  # a lower bound for the call; they differ if an earlier peak was higher
    kind: Literal["handler"] = "handler"


Report = CompiledReport | HandlerReport
_REPORT: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


def parse_report(body: bytes) -> Report:
    """Parse a report. Raises ProtocolError."""
    if len(body) > MAX_REPORT_BYTES:
        raise ProtocolError("the agent's report is too long")
    return check(_REPORT, decode_json(body), "report")
