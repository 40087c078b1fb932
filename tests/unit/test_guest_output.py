"""Captured output: the head live, the tail at the end, all of it in a file, and right totals."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guest.agent import output
from guest.agent.output import Capture


def no_spill() -> tuple[int, str]:
    raise OSError(errno.ENOSPC, "no space")


def test_short_output_is_sent_live_and_nothing_else():
    sent: list[tuple[bytes, int]] = []
    capture = Capture(100, 10, lambda data, gap: sent.append((data, gap)), no_spill)
    capture.feed(b"hello ")
    capture.feed(b"world")
    assert sent == [(b"hello ", 0), (b"world", 0)]
    capture.finish()
    assert len(sent) == 2
    assert (capture.total, capture.spilled, capture.complete) == (11, None, True)


def test_output_that_fits_head_and_tail_has_no_gap_and_no_file():
    sent: list[tuple[bytes, int]] = []
    capture = Capture(4, 4, lambda data, gap: sent.append((data, gap)), no_spill)
    capture.feed(b"abcdefgh")
    capture.finish()
    assert sent == [(b"abcd", 0), (b"efgh", 0)]
    assert capture.spilled is None
    assert capture.complete


@given(
    st.lists(st.binary(min_size=1, max_size=400), max_size=30),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_head_gap_and_tail_always_add_up(tmp_path_factory, pieces, head, tail):
    path = tmp_path_factory.mktemp("spill") / "out.txt"
    sent: list[tuple[bytes, int]] = []

    def open_spill() -> tuple[int, str]:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), str(path)

    capture = Capture(head, tail, lambda data, gap: sent.append((data, gap)), open_spill)
    for piece in pieces:
        capture.feed(piece)
    capture.finish()
    whole = b"".join(pieces)
    gap = sum(gap for _, gap in sent)
    text = b"".join(data for data, _ in sent)
    assert capture.total == len(whole) == len(text) + gap
    if gap:
        assert gap == len(whole) - head - tail
        assert text == whole[:head] + (whole[-tail:] if tail else b"")
        assert path.read_bytes() == whole
        assert capture.spilled == str(path)
    else:
        assert text == whole
        assert capture.spilled is None


def test_a_full_disk_is_reported_and_the_totals_stay_right():
    sent: list[tuple[bytes, int]] = []
    capture = Capture(2, 2, lambda data, gap: sent.append((data, gap)), no_spill)
    for _ in range(10):
        capture.feed(b"abcd")
    capture.finish()
    assert (capture.total, capture.spilled, capture.complete) == (40, None, False)
    assert sent[-1] == (b"cd", 36)


def test_a_spill_file_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MAX_SPILL", 10)
    path = tmp_path / "out.txt"
    capture = Capture(2, 2, lambda data, gap: None, lambda: (os.open(path, os.O_WRONLY | os.O_CREAT), str(path)))
    for _ in range(10):
        capture.feed(b"abcd")
    capture.finish()
    assert path.read_bytes() == b"abcdabcdab"
    assert (capture.total, capture.complete) == (40, False)


@pytest.mark.parametrize("head", [0, 5])
def test_without_a_tail_only_the_gap_is_sent(head, tmp_path):
    path = tmp_path / "out.txt"
    sent: list[tuple[bytes, int]] = []
    capture = Capture(
        head,
        0,
        lambda data, gap: sent.append((data, gap)),
        lambda: (os.open(path, os.O_WRONLY | os.O_CREAT), str(path)),
    )
    capture.feed(b"0123456789")
    capture.finish()
    assert sent[-1] == (b"", 10 - head)
