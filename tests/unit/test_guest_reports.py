"""Reports of a machine are parsed strictly: it may be hostile."""

import json
from typing import Any

import pytest

from guest.client.reports import MAX_CASES, MAX_REPORT_BYTES, CompiledReport, HandlerReport, parse_report
from guest.errors import ProtocolError

END = {"exit_code": 0, "signal": None, "wall_ms": 3, "cpu_ms": 2, "peak_bytes": 4096}
CASE = {"verdict": "passed", "end": END, "stdout": "1\n", "stderr": "", "diff": ""}
COMPILED = {
    "kind": "compiled",
    "phase": "run",
    "command": "g++ main.cpp",
    "compile_ms": 12,
    "diagnostics": "",
    "warnings": "",
    "note": "",
    "end": END,
    "cases": [CASE],
}
HANDLER = {"kind": "handler", "result": "1", "result_bytes": 1, "result_file": None, "end": END, "least_peak_bytes": 0}


def parsed(report: Any) -> object:
    return parse_report(json.dumps(report).encode())


def test_a_valid_report_is_parsed():
    report = parsed(COMPILED)
    assert isinstance(report, CompiledReport)
    assert report.end is not None
    assert (report.phase, report.compile_ms, report.end.peak_bytes) == ("run", 12, 4096)
    assert [case.verdict for case in report.cases] == ["passed"]
    assert isinstance(parsed(HANDLER), HandlerReport)


def test_a_process_that_a_signal_ended_has_no_exit_code():
    report = parsed(COMPILED | {"end": END | {"exit_code": None, "signal": "SIGSEGV", "peak_bytes": None}})
    assert isinstance(report, CompiledReport)
    assert report.end is not None
    assert (report.end.exit_code, report.end.signal, report.end.peak_bytes) == (None, "SIGSEGV", None)


@pytest.mark.parametrize(
    "report",
    [
        [],
        "compiled",
        {},
        COMPILED | {"kind": "interpreted"},
        COMPILED | {"phase": "link"},
        COMPILED | {"command": None},
        COMPILED | {"compile_ms": -1},
        COMPILED | {"compile_ms": 1.5},
        COMPILED | {"compile_ms": True},
        COMPILED | {"compile_ms": 2**63},
        COMPILED | {"diagnostics": ["a"]},
        COMPILED | {"warnings": 1},
        COMPILED | {"note": None},
        COMPILED | {"note": "x" * 501},
        COMPILED | {"end": []},
        COMPILED | {"end": END | {"wall_ms": "3"}},
        COMPILED | {"end": END | {"signal": 9}},
        COMPILED | {"end": END | {"signal": "SIG" + "X" * 20}},
        COMPILED | {"end": END | {"peak_bytes": -4096}},
        COMPILED | {"cases": {}},
        COMPILED | {"cases": [CASE] * (MAX_CASES + 1)},
        COMPILED | {"cases": ["passed"]},
        COMPILED | {"cases": [CASE | {"verdict": "excellent"}]},
        COMPILED | {"cases": [CASE | {"diff": None}]},
        HANDLER | {"result": 1},
        HANDLER | {"result_bytes": -1},
        HANDLER | {"end": None},
        HANDLER | {"result_file": 1},
        HANDLER | {"result_file": "/" * 4097},
        HANDLER | {"least_peak_bytes": None},
    ],
)
def test_an_invalid_report_breaks_the_protocol(report: Any):
    with pytest.raises(ProtocolError):
        parsed(report)


def test_a_report_that_is_too_long_or_not_json_breaks_the_protocol():
    for body in (b"", b"{", b"\xff", json.dumps(COMPILED | {"note": "x" * MAX_REPORT_BYTES}).encode()):
        with pytest.raises(ProtocolError):
            parse_report(body)


def test_half_a_surrogate_pair_in_a_report_is_replaced():
    report = parse_report(json.dumps(COMPILED | {"diagnostics": "\ud800"}).encode())
    assert isinstance(report, CompiledReport)
    assert report.diagnostics == "?"


def test_what_a_status_line_shows_of_a_report_is_one_short_line():
    report = parsed(COMPILED | {"command": "g++\n[ok]\x1b\u202e" + "-DX " * 5000, "note": "a\nb"})
    assert isinstance(report, CompiledReport)
    assert report.command.startswith(r"g++\n[ok]\x1b\u202e-DX")
    assert report.command.endswith("…")
    assert len(report.command) < 600
    assert report.note == r"a\nb"
