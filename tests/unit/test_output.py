"""The output log of a run and its pages."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.runs.output import OutputLog
from mcp_sandbox.runs.results import HeadTail
from mcp_sandbox.views.text import collapsed


def test_both_streams_form_one_text_in_order_of_arrival():
    log = OutputLog(1000)
    log.add("stdout", "one\n")
    log.add("stderr", "two\n")
    log.add("stdout", "three\n")
    assert log.page(0, 100).text == "one\ntwo\nthree\n"
    assert log.newest_line() == "three"


@given(st.lists(st.text(max_size=20)), st.integers(4, 50))
def test_pages_add_up_to_the_whole_log_and_split_no_character(texts: list[str], limit: int):
    log = OutputLog(10_000)
    for text in texts:
        log.add("stdout", text.encode(errors="replace").decode())
    read, offset = "", 0
    while True:
        page = log.page(offset, limit)
        assert page.start == offset
        read += page.text
        if page.end == page.size:
            break
        offset = page.end
    assert read == "".join(text.encode(errors="replace").decode() for text in texts)


def test_an_offset_inside_a_character_moves_to_the_next_one():
    log = OutputLog(1000)
    log.add("stdout", "☃☃")
    page = log.page(1, 100)
    assert (page.start, page.end, page.text) == (3, 6, "☃")
    assert log.page(99, 100).start == 6


def test_a_note_marks_missing_bytes():
    log = OutputLog(1000)
    log.add("stdout", "start")
    log.add("stdout", "end", gap_bytes=12_345)
    assert log.page(0, 100).text == "start\n[… 12,345 bytes of stdout are missing here …]\nend"


def test_a_full_log_keeps_its_start_and_counts_the_rest():
    log = OutputLog(10)
    for _ in range(1000):
        log.add("stdout", "12345678")
    log.close()
    assert log.page(0, 1000).text == "12345678\n[… 7,992 bytes of output that came after this were not kept …]\n"
    assert len(log) < 100


def test_the_newest_line_is_short_and_not_empty():
    log = OutputLog(100_000)
    assert log.newest_line() == ""
    log.add("stderr", "10%\r20%\r30%\r\n\n")
    assert log.newest_line() == "30%"
    log.add("stdout", "x" * 50_000)
    assert log.newest_line() == "x" * 199 + "…"
    log.add("stdout", "\nred \x1b[31m\u202e\n")
    assert log.newest_line() == r"red \x1b[31m\u202e"


async def test_waiting_for_output_ends_with_output_or_with_the_run():
    log = OutputLog(1000)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.grown, 3)
            await anyio.wait_all_tasks_blocked()
            log.add("stdout", "12")
            await anyio.wait_all_tasks_blocked()
            log.add("stdout", "3")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.grown, 100)
            await anyio.wait_all_tasks_blocked()
            log.close()


def test_output_missing_from_a_result_is_in_the_log():
    log, ends = OutputLog(1000), HeadTail(4, 4)
    for stream, text in (("stdout", "ab"), ("stderr", "!!"), ("stdout", "cdefghijkl")):
        if stream == "stdout":
            ends.add(text, log_offset=len(log))
        log.add(stream, text)  # type: ignore[arg-type]
    kept = ends.captured()
    assert (kept.head, kept.tail, kept.omitted_bytes) == ("abcd", "ijkl", 4)
    assert kept.log_offset is not None
    assert log.page(kept.log_offset, 4).text == "efgh"


def test_output_that_never_arrived_is_not_in_the_log():
    ends = HeadTail(100, 100)
    ends.add("start", log_offset=0)
    ends.add("end", gap_bytes=1000, log_offset=5)
    assert (ends.captured().omitted_bytes, ends.captured().log_offset) == (1000, None)


BAR = "".join(f"\r{percent:3}%|{'█' * (percent // 10):10}| 40/s" for percent in range(101))


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_the_last_state_of_a_progress_bar_is_kept_and_nothing_is_omitted(step: int):
    ends, text = HeadTail(300, 300), f"start\n{BAR}\ndone\n"
    for place in range(0, len(text), step):
        ends.add(text[place : place + step], log_offset=len(text[:place].encode()))
    kept = ends.captured()
    assert kept.omitted_bytes == 0
    assert collapsed(kept.head) == "start\n100%|██████████| 40/s\ndone\n"
    assert ends.total == len(text.encode())


def test_progress_bars_between_other_output_leave_room_for_it_at_the_end():
    ends = HeadTail(100, 100)
    for part in ("x" * 99, "\n", BAR, "\nthe end"):
        ends.add(part)
    kept = ends.captured()
    assert kept.head.endswith("\n100%|██████████| 40/s\nthe end")
    assert ends.total == 99 + 1 + len(BAR.encode()) + len("\nthe end")


def test_a_stream_that_fits_keeps_its_carriage_returns():
    ends = HeadTail(100, 100)
    ends.add("10%\r20%\r\n")
    assert ends.captured().head == "10%\r20%\r\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n", "plain\n"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("10%\r20%", "20%"),
        ("10%\r20%\r", "20%\r"),
        ("10%\r\x1b[2K20%\n", "20%\n"),
        ("Downloading 10 MB\rdone\nnext", "done\nnext"),
    ],
)
def test_a_line_shows_what_its_last_carriage_return_has_left(text: str, shown: str):
    assert collapsed(text) == shown
