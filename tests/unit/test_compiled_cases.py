"""Comparing what a program wrote with what was expected, and keeping reports short."""

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
    ("expected", "written", "told"),
    [
        ("1\n2", "1\n3", 'line 2: expected "2", got "3"'),
        ("1\n2", "1", 'line 2: expected "2", but the output ends before it'),
        ("1", "1\n2", 'line 2: "2" comes after the end of the expected output'),
        ("1", "", 'line 1: expected "1", got ""'),
    ],
)
def test_a_difference_names_the_line(expected: str, written: str, told: str):
    assert difference(expected, written) == told


def test_of_many_differences_the_first_are_told_and_long_lines_are_cut():
    told = difference("\n".join(["a" * 10_000] * 50), "\n".join(["b" * 10_000] * 50))
    assert told.count("line ") == 3
    assert told.endswith("…")
    assert len(told) < 1500


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (ended(), "passed"),
        (ended(3 << 8), "runtime error"),
        (ended(signal.SIGSEGV), "runtime error"),
        (ended(signal.SIGKILL, "time"), "time limit exceeded"),
        (ended(signal.SIGKILL, "memory"), "memory limit exceeded"),
        (ended(signal.SIGKILL, oom_killed=True), "memory limit exceeded"),
        (ended(signal.SIGKILL), "runtime error"),  # by its own hand
        (ended(peak_bytes=65 * MIB), "memory limit exceeded"),
        (ended(signal.SIGABRT, stderr=b"terminate called after throwing 'std::bad_alloc'"), "memory limit exceeded"),
        (ended(2 << 8, stderr=b"fatal error: runtime: out of memory"), "memory limit exceeded"),
        (ended(stderr=b"caught std::bad_alloc"), "passed"),
        (ended(signal.SIGINT, "interrupted"), "not run"),
    ],
)
def test_the_verdict_follows_from_how_the_program_ended(how: Ended, told: str):
    assert verdict(how, 64 * MIB, "", "") == told


def test_output_is_judged_only_where_some_is_expected():
    assert verdict(ended(), None, None, "") == "ran"
    assert verdict(ended(), None, "1", "line 1: …") == "wrong output"


@pytest.mark.parametrize("text", ["a" * 10_000, "\0" * 10_000, "\U0001f600" * 10_000, 'a"' * 5000, ""])
def test_a_text_is_cut_by_what_it_takes_on_the_wire(text: str):
    short = cut(text, 1000)
    assert text.startswith(short)
    assert len(encode_json(short)) <= 1000
    assert bool(short) is bool(text)


def test_a_text_that_fits_is_left_alone():
    assert cut("short", CASES_ROOM) == "short"
