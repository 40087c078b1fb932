"""Suites in the emulated host go on after it hung: what has ended does not run again."""

from tests.functional.emulated_suite import HANGS, Progress


def started(progress: Progress, test: str) -> None:
    progress.add({"what": "started", "test": test})


def ended(progress: Progress, test: str, what: str = "passed") -> None:
    progress.add({"what": what, "test": test})
    progress.add({"what": "ended", "test": test})


def failures(progress: Progress) -> list[str]:
    return [report["test"] for report in progress.reports if report["what"] == "failed"]


def test_tests_that_have_ended_do_not_run_again():
    progress = Progress()
    for test, what in (("a", "passed"), ("b", "failed"), ("c", "skipped")):
        started(progress, test)
        ended(progress, test, what)
    started(progress, "d")
    assert progress.settled == {"a", "b", "c"}


def test_a_test_whose_host_hung_runs_again():
    progress = Progress()
    started(progress, "a")
    progress.host_ended()
    assert progress.settled == set()
    assert progress.hangs == {"a": 1}


def test_a_test_that_always_hangs_its_host_has_failed():
    progress = Progress()
    for _ in range(HANGS):
        assert progress.settled == set()
        started(progress, "a")
        progress.host_ended()
    assert progress.settled == {"a"}
    assert failures(progress) == ["a"]


def test_a_host_that_hung_between_tests_is_held_against_none():
    progress = Progress()
    started(progress, "a")
    ended(progress, "a")
    progress.host_ended()
    assert not progress.hangs


def test_a_finished_host_has_not_hung():
    progress = Progress()
    started(progress, "a")
    ended(progress, "a")
    progress.add({"what": "finished"})
    progress.host_ended()
    assert progress.finished
    assert not progress.hangs
    assert failures(progress) == []


def test_a_repeated_test_is_still_running():
    progress = Progress()
    started(progress, "a")
    progress.add({"what": "rerun", "test": "a"})
    progress.host_ended()
    assert progress.hangs == {"a": 1}


def test_a_test_that_passed_and_hung_while_it_cleaned_up_has_not_passed():
    progress = Progress()
    for _ in range(HANGS):
        assert progress.settled == set()
        started(progress, "a")
        progress.add({"what": "passed", "test": "a"})
        progress.host_ended()
    assert [report["what"] for report in progress.reports] == ["failed"]


def test_a_lost_line_does_not_make_a_test_run_again():
    progress = Progress()
    for test in ("a", "b"):
        started(progress, test)
    progress.add({"what": "finished"})
    assert progress.settled == {"a", "b"}
