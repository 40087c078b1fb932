"""Parts of a result as plain text that is the same in every face."""

import re
from collections import Counter
from collections.abc import Sequence

from guest.client.messages import Display
from guest.client.reports import CaseResult, CompiledReport, HandlerReport, ProcessEnd
from mcp_sandbox.views.runs import MissingModule

READABLE_FORMS = ("text/markdown", "text/plain", "text/latex", "application/json")  # best first
ERASE = re.compile(r"\x1b\[[0-2]?K")  # what a terminal takes as "erase the line"
MAX_COMPILER_CHARS = 6000  # the first compiler errors explain the rest
MAX_CASE_CHARS = 500  # output shown for one case
MAX_CASES_CHARS = 8000  # output shown for all cases, besides one line for each


def readable(display: Display) -> str:
    """Return the most readable text form of a displayed value, or an empty string."""
    return next((display.data[form] for form in READABLE_FORMS if form in display.data), "")


def collapsed(text: str) -> str:
    """Return text in which each line is what its last carriage return has left: the last state of a progress bar.

    A carriage return at the very end is kept, because what follows it would replace the line.
    """
    if "\r" not in text:
        return text
    end = "\r" if text.endswith("\r") else ""
    return "\n".join(map(_last_state, text.split("\n"))) + end


def _last_state(line: str) -> str:
    state = line.rstrip("\r").rpartition("\r")[2]
    return ERASE.sub("", state)


def missing_module(missing: MissingModule, ask: str) -> str:
    """Return which template has a module. `ask` is how the face asks for one, with `{}` for its name."""
    found = " or ".join(f"{ask.format(name)} ({package})" for name, package in missing.templates.items())
    if found:
        return f"This template does not have {missing.module!r}; use {found}."
    return (
        f"No template has {missing.module!r}. With a network, a sandbox can install it with pip; otherwise the user "
        "can add it to a template."
    )


def compiled_parts(report: CompiledReport) -> list[str]:
    """Return the compiler's output, a checker's warnings, our note and the test cases; empty parts are empty."""
    return [
        _tool_output("compiler", report.diagnostics),
        _tool_output("warnings", report.warnings),
        f"note: {report.note}" if report.note else "",
        _cases(report.cases),
    ]


def compiled_summary(report: CompiledReport) -> list[str]:
    """Return phrases for a status line: compile time, command, and what the program used."""
    outcome = "failed to compile after" if report.phase == "compile" else "compiled in"
    phrases = [f"{outcome} {report.compile_ms:,} ms ({report.command})"]
    if report.phase == "check":
        phrases.append("only checked, not run: there is no main function, or the flags produce no program")
    elif report.end is not None:
        phrases.append(f"ran {_usage(report.end)}")
    return phrases


def handler_usage(report: HandlerReport) -> str:
    """Return one line with the duration, CPU time and peak memory of a handler call."""
    least, most = (round(size / 2**20) for size in (report.least_peak_bytes, report.end.peak_bytes or 0))
    peak = f"{least:,} MB" if least >= most else f"{least:,} to {most:,} MB (an earlier peak hides the exact one)"
    return f"handler: {report.end.wall_ms:,} ms, CPU {report.end.cpu_ms:,} ms, peak memory {peak}"


def _tool_output(title: str, text: str) -> str:
    text = text.strip()
    if len(text) > MAX_COMPILER_CHARS:
        text = f"{text[:MAX_COMPILER_CHARS]}\n[… {len(text) - MAX_COMPILER_CHARS:,} characters omitted …]"
    return f"{title}:\n{text}" if text else ""


def _cases(cases: Sequence[CaseResult]) -> str:
    if not cases:
        return ""
    verdicts = Counter(case.verdict for case in cases)
    lines = [f"cases: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.items())}"]
    room = MAX_CASES_CHARS
    omitted = 0
    for number, case in enumerate(cases, 1):
        lines.append(_case(number, case))
        details = _details(case)
        if len(details) > room:
            omitted += 1
        elif details:
            room -= len(details)
            lines.append(details)
    if omitted:
        lines.append(f"(output of {omitted} more cases omitted; run fewer at once)")
    return "\n".join(lines)


def _case(number: int, case: CaseResult) -> str:
    phrases: list[str] = [case.verdict]
    if case.end is not None and case.verdict == "runtime error":
        phrases.append(case.end.signal or f"exit code {case.end.exit_code}")
    if case.end is not None:
        phrases.append(_usage(case.end))
    return f"{number}: {', '.join(phrases)}"


def _details(case: CaseResult) -> str:
    """Return what explains the verdict, indented."""
    match case.verdict:
        case "wrong output":
            text = case.diff
        case "ran":
            text = case.stdout
        case "runtime error" | "sanitizer finding" | "memory limit exceeded":
            text = case.stderr or case.stdout
        case _:
            text = ""
    text = text.strip()
    if len(text) > MAX_CASE_CHARS:
        text = f"{text[:MAX_CASE_CHARS]} …"
    return "\n".join(f"   {line}" for line in text.splitlines())


def _usage(end: ProcessEnd) -> str:
    memory = "" if end.peak_bytes is None else f", peak {end.peak_bytes / 2**20:,.0f} MB"
    return f"{end.wall_ms:,} ms ({end.cpu_ms:,} ms CPU){memory}"
