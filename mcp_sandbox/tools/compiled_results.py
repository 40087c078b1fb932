"""What was compiled and how it did, in words for a model."""

from collections import Counter

from guest.client.reports import CaseResult, CompiledReport, ProcessEnd

MAX_SAID_CHARS = 6000  # of what a compiler said; the first errors explain the rest
MAX_COMMAND_CHARS = 500  # of what compiled it; the caller knows the flags
MAX_CASE_CHARS = 500  # of what is told about one case
MAX_DETAILS_CHARS = 8000  # of what is told about all cases; each has its line besides


def compiled_parts(report: CompiledReport) -> list[str]:
    """Everything but the last line."""
    return [
        _said("compiler", report.diagnostics),
        _said("warnings", report.warnings),
        f"note: {report.note}" if report.note else "",
        _cases(report.cases),
    ]


def compiled_words(report: CompiledReport) -> list[str]:
    """What the last line says of it."""
    how = "not compiled, after" if report.phase == "compile" else "compiled in"
    command = report.command if len(report.command) <= MAX_COMMAND_CHARS else f"{report.command[:MAX_COMMAND_CHARS]} …"
    words = [f"{how} {report.compile_ms:,} ms ({command})"]
    if report.phase == "check":
        words.append("only checked: there is no main function, or the flags make no program, so nothing was run")
    elif report.end is not None:
        words.append(f"ran {_measured(report.end)}")
    return words


def _said(who: str, text: str) -> str:
    text = text.strip()
    if len(text) > MAX_SAID_CHARS:
        text = f"{text[:MAX_SAID_CHARS]}\n[… {len(text) - MAX_SAID_CHARS:,} characters left out …]"
    return f"{who}:\n{text}" if text else ""


def _cases(cases: tuple[CaseResult, ...]) -> str:
    if not cases:
        return ""
    verdicts = Counter(case.verdict for case in cases)
    lines = [f"cases: {', '.join(f'{number} {verdict}' for verdict, number in verdicts.items())}"]
    room = MAX_DETAILS_CHARS
    untold = 0
    for number, case in enumerate(cases, 1):
        lines.append(_line(number, case))
        details = _details(case)
        if len(details) > room:
            untold += 1
        elif details:
            room -= len(details)
            lines.append(details)
    if untold:
        lines.append(f"(what {untold} more cases wrote is left out; run fewer at once)")
    return "\n".join(lines)


def _line(number: int, case: CaseResult) -> str:
    words: list[str] = [case.verdict]
    if case.end is not None and case.verdict == "runtime error":
        words.append(case.end.signal or f"exit code {case.end.exit_code}")
    if case.end is not None:
        words.append(_measured(case.end))
    return f"{number}: {', '.join(words)}"


def _details(case: CaseResult) -> str:
    """What explains a verdict, indented."""
    match case.verdict:
        case "wrong output":
            text = case.diff
        case "ran":
            text = case.stdout
        case "runtime error" | "memory limit exceeded":
            text = case.stderr or case.stdout
        case _:
            text = ""
    text = text.strip()
    if len(text) > MAX_CASE_CHARS:
        text = f"{text[:MAX_CASE_CHARS]} …"
    return "\n".join(f"   {line}" for line in text.splitlines())


def _measured(end: ProcessEnd) -> str:
    memory = "" if end.peak_bytes is None else f", peak {end.peak_bytes / 2**20:,.0f} MB"
    return f"{end.wall_ms:,} ms ({end.cpu_ms:,} ms CPU){memory}"
