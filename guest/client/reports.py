"""What a run has measured: values, and how they are read from a machine that may be hostile."""

from dataclasses import dataclass
from typing import Any, Literal

from guest.client import fields as read
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
    "not run",  # the run was stopped before its turn
]
MAX_CASES = 100
MAX_REPORT_BYTES = 512 * 1024
MAX_PATH = 4096  # characters
MAX_SIGNAL = 20  # of a name
MAX_NOTE = 500


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended and what it took."""

    exit_code: int | None
    signal: str | None  # by name
    wall_ms: int
    cpu_ms: int
    peak_bytes: int | None  # None: this machine does not tell


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One test case."""

    verdict: Verdict
    end: ProcessEnd | None
    stdout: str  # its beginning
    stderr: str  # the same
    diff: str  # where the output is not what was expected, cut short


@dataclass(frozen=True, slots=True)
class CompiledReport:
    """A run of code that is compiled first."""

    phase: Phase  # the last one it came to; check: there is no main, so it was compiled and not run
    command: str  # what compiled it
    compile_ms: int
    diagnostics: str  # what the compiler said, cut short
    warnings: str  # what a checker besides the compiler said, cut short
    note: str  # what was changed in the code before it was compiled
    end: ProcessEnd | None  # of the program, where there were no cases
    cases: tuple[CaseResult, ...] = ()


@dataclass(frozen=True, slots=True)
class HandlerReport:
    """A call of a handler."""

    result: str | None  # JSON; None: it raised, or gave something that is not JSON
    result_bytes: int  # of the JSON, of which `result` may only be the beginning
    result_file: str | None  # where in the machine all of it is, if it is not here
    end: ProcessEnd  # its peak is not lower than that of the call itself
    least_peak_bytes: int  # and this is not higher: the two differ where the machine only knows of earlier peaks


Report = CompiledReport | HandlerReport


def parse_report(body: bytes) -> Report:
    """Read a report; raises ProtocolError."""
    if len(body) > MAX_REPORT_BYTES:
        raise ProtocolError("the agent's report is too long")
    fields = read.table(decode_json(body), "report")
    if read.choice(fields, "kind", Literal["compiled", "handler"]) == "handler":
        return HandlerReport(
            result=read.text_or_none(fields, "result"),
            result_bytes=read.whole(fields, "result_bytes"),
            result_file=read.text_or_none(fields, "result_file", MAX_PATH),
            end=_end(fields.get("end")),
            least_peak_bytes=read.whole(fields, "least_peak_bytes"),
        )
    cases = fields.get("cases", [])
    if type(cases) is not list or len(cases) > MAX_CASES:
        raise ProtocolError("the agent's 'cases' is not a short list")
    return CompiledReport(
        phase=read.choice(fields, "phase", Phase),
        command=read.text(fields, "command"),
        compile_ms=read.whole(fields, "compile_ms"),
        diagnostics=read.text(fields, "diagnostics"),
        warnings=read.text(fields, "warnings"),
        note=read.text(fields, "note", MAX_NOTE),
        end=_end_or_none(fields),
        cases=tuple(_case(read.table(case, "case")) for case in cases),
    )


def _case(fields: dict[str, Any]) -> CaseResult:
    return CaseResult(
        verdict=read.choice(fields, "verdict", Verdict),
        end=_end_or_none(fields),
        stdout=read.text(fields, "stdout"),
        stderr=read.text(fields, "stderr"),
        diff=read.text(fields, "diff"),
    )


def _end_or_none(fields: dict[str, Any]) -> ProcessEnd | None:
    return None if fields.get("end") is None else _end(fields["end"])


def _end(value: Any) -> ProcessEnd:  # noqa: ANN401 - checked here
    fields = read.table(value, "end of a process")
    return ProcessEnd(
        exit_code=None if fields.get("exit_code") is None else read.whole(fields, "exit_code"),
        signal=read.text_or_none(fields, "signal", MAX_SIGNAL),
        wall_ms=read.whole(fields, "wall_ms"),
        cpu_ms=read.whole(fields, "cpu_ms"),
        peak_bytes=None if fields.get("peak_bytes") is None else read.whole(fields, "peak_bytes"),
    )
