"""Results of compiled code as a model reads them."""

from dataclasses import replace

from mcp_types import TextContent

from guest.client.reports import CaseResult, CompiledReport, ProcessEnd, Verdict
from mcp_sandbox.tools.run_text import run_blocks
from mcp_sandbox.views import ArtifactView, RunTimings, RunView, StreamView

END = ProcessEnd(0, None, 1204, 1180, 12 * 2**20)
REPORT = CompiledReport("run", "g++ main.cpp -O2", 312, "", "", "", END)
RESULT = RunView(
    sandbox_id="sb-1",
    run_id="run-1",
    lost_before=True,
    status="ok",
    timed_out_after_s=None,
    stopped=False,
    state="lost",
    exit_code=0,
    signal=None,
    error=None,
    stdout=StreamView(head="hi\n"),
    stderr=StreamView(),
    displays=(),
    displays_dropped=0,
    artifacts=(),
    images=(),
    timings=RunTimings(queue_ms=0, restore_ms=0, run_ms=1, total_ms=2),
    report=REPORT,
    language="cpp",
    kind="code",
)


def case(verdict: Verdict, *, end: ProcessEnd | None = END, out: str = "", err: str = "", diff: str = "") -> CaseResult:
    return CaseResult(verdict, end, out, err, diff)


def text_of(report: CompiledReport, **changes: object) -> str:
    block = run_blocks(RESULT.model_copy(update={"report": report, **changes}))[0]
    assert isinstance(block, TextContent)
    return block.text


def test_the_last_line_has_the_times_and_the_peak():
    text = text_of(REPORT)
    assert text.startswith("stdout:\nhi\n\n[ok · compiled in 312 ms (g++ main.cpp -O2) · ")
    assert "ran 1,204 ms (1,180 ms CPU), peak 12 MB" in text


def test_compiled_languages_never_mention_variables():
    for changes in ({}, {"stopped": True}, {"timed_out_after_s": 3.0}, {"state": "kept", "stopped": True}):
        assert "variables" not in text_of(REPORT, **changes)


def test_a_stopped_command_does_not_mention_variables():
    of_python = {"language": "python", "report": None, "state": "kept", "stopped": True, "lost_before": False}
    for kind, said in (("code", True), ("invoke", True), ("command", False)):
        block = run_blocks(RESULT.model_copy(update={**of_python, "kind": kind}))[0]
        assert isinstance(block, TextContent)
        assert ("variables are kept" in block.text) is said


def test_a_case_without_expectation_does_not_count_as_passed():
    text = text_of(replace(REPORT, end=None, cases=(case("passed"), case("ran"), case("wrong output"))))
    assert "cases: 1 passed, 1 ran, 1 wrong output\n" in text


def test_the_name_of_an_artifact_is_escaped():
    named = ArtifactView(path="/tmp/outputs/a\u202e", size=1, mime_type="text/plain")
    text = text_of(REPORT, artifacts=(named,))
    assert '- "/tmp/outputs/a\\u202e" (text/plain, 1 bytes)' in text


def test_code_that_was_only_checked_says_so():
    assert "only checked, not run: there is no main function" in text_of(replace(REPORT, phase="check", end=None))


def test_compiler_output_and_warnings_are_shown_and_cut():
    text = text_of(replace(REPORT, diagnostics="e" * 9000, warnings="unreachable code\n", note="a word was added"))
    assert "compiler:\neee" in text
    assert "[… 3,000 characters omitted …]" in text
    assert "warnings:\nunreachable code\n\nnote: a word was added" in text


def test_every_case_has_a_line_and_what_explains_it():
    cases = (
        case("passed", out="not shown"),
        case("wrong output", diff='line 1: expected "1", got "2"'),
        case("runtime error", end=replace(END, exit_code=None, signal="SIGSEGV"), err="oh\nno"),
        case("runtime error", end=replace(END, exit_code=3)),
        case("time limit exceeded"),
        case("not run", end=None),
    )
    lines = text_of(replace(REPORT, end=None, cases=cases)).splitlines()
    start = lines.index("cases: 1 passed, 1 wrong output, 2 runtime error, 1 time limit exceeded, 1 not run")
    took = "1,204 ms (1,180 ms CPU), peak 12 MB"
    assert lines[start + 1 : start + 10] == [
        f"1: passed, {took}",
        f"2: wrong output, {took}",
        '   line 1: expected "1", got "2"',
        f"3: runtime error, SIGSEGV, {took}",
        "   oh",
        "   no",
        f"4: runtime error, exit code 3, {took}",
        f"5: time limit exceeded, {took}",
        "6: not run",
    ]


def test_a_hundred_noisy_cases_stay_readable():
    text = text_of(replace(REPORT, end=None, cases=(case("ran", out="x" * 4000),) * 100))
    assert "cases: 100 ran" in text
    assert "more cases omitted" in text
    assert len(text) < 16_000
