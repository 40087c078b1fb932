"""Comparing output with what is expected, verdicts, and short reports."""

import signal

import pytest

from guest.kernels.cases import CASES_ROOM, cut, difference, verdict
from guest.kernels.runner import Ended
from guest.protocol import encode_json

MIB = 2**20


def ended(
    status: int = 0, cause: str = "", peak_bytes: int = MIB, stderr: bytes = b"", *, oom_killed: bool = False
) -> Ended:
    return Ended(status, cause, 10**6, 0.001, peak_bytes, b"", stderr, oom_killed=oom_killed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expected", "written"),
    [("1\n2", "1\n2\n\n"), ("1 \n2", "1\n2"), ("", "\n \n"), ("a\r\nb", "a\nb"), ("1\n\n2", "1\n \n2")],
)
def test_white_space_at_ends_makes_no_difference(expected: str, written: str):
    assert difference(expected, written) == ""


@pytest.mark.parametrize(
    ("expected", "written", "shown"),
    [
        ("1\n2", "1\n3", 'line 2: expected "2", got "3"'),
        ("1\n2", "1", 'line 2: expected "2", but the output ends before it'),
        ("1", "1\n2", 'line 2: "2" comes after the end of the expected output'),
        ("1", "", 'line 1: expected "1", got ""'),
    ],
)
def test_a_difference_names_the_line(expected: str, written: str, shown: str):
    assert difference(expected, written) == shown


def test_only_the_first_differences_are_shown_and_long_lines_are_cut():
    shown = difference("\n".join(["a" * 10_000] * 50), "\n".join(["b" * 10_000] * 50))
    assert shown.count("line ") == 3
    assert shown.endswith("…")
    assert len(shown) < 1500


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (ended(), "passed"),
        (ended(3 << 8), "runtime error"),
        (ended(signal.SIGSEGV), "runtime error"),
        (ended(signal.SIGKILL, "time"), "time limit exceeded"),
        (ended(signal.SIGKILL, "memory"), "memory limit exceeded"),
        (ended(signal.SIGKILL, oom_killed=True), "memory limit exceeded"),
        (ended(signal.SIGKILL), "runtime error"),  # by itself
        (ended(peak_bytes=65 * MIB), "memory limit exceeded"),
        (ended(signal.SIGABRT, stderr=b"terminate called after throwing 'std::bad_alloc'"), "memory limit exceeded"),
        (ended(2 << 8, stderr=b"fatal error: runtime: out of memory"), "memory limit exceeded"),
        (ended(stderr=b"caught std::bad_alloc"), "passed"),
        (ended(1 << 8, stderr=b'Exception in thread "main" java.lang.OutOfMemoryError: heap'), "memory limit exceeded"),
        (ended(signal.SIGINT, "interrupted"), "not run"),
        (ended(stderr=b"hi\nmain.cpp:3:9: runtime error: signed integer overflow: 2 + 1\n"), "sanitizer finding"),
        (ended(1 << 8, stderr=b"==7==ERROR: AddressSanitizer: heap-buffer-overflow on"), "sanitizer finding"),
        (ended(66 << 8, stderr=b"=====\nWARNING: ThreadSanitizer: data race (pid=7)"), "sanitizer finding"),
        (ended(66 << 8, stderr=b"=====\nWARNING: DATA RACE\nRead at"), "sanitizer finding"),
        (ended(stderr=b"my own runtime error: no"), "passed"),
    ],
)
def test_the_verdict_follows_from_how_the_program_ended(end: Ended, expected: str):
    assert verdict(end, 64 * MIB, "", "") == expected


def test_output_is_compared_only_if_some_is_expected():
    assert verdict(ended(), None, None, "") == "ran"
    assert verdict(ended(), None, "1", "line 1: …") == "wrong output"


@pytest.mark.parametrize("text", ["a" * 10_000, "\0" * 10_000, "\U0001f600" * 10_000, 'a"' * 5000, ""])
def test_a_text_is_cut_by_its_size_as_json(text: str):
    short = cut(text, 1000)
    assert text.startswith(short)
    assert len(encode_json(short)) <= 1000
    assert bool(short) is bool(text)


def test_a_text_that_fits_is_unchanged():
    assert cut("short", CASES_ROOM) == "short"
