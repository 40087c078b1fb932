"""A plugin of pytest for the emulated host: only the tests of one driver, and a line of JSON for each outcome."""

import json
import sys
import time
from pathlib import Path

import pytest

MARK = "TEST "
MAX_REASON = 3000  # characters: the console is slow

LAST = {"test_clones_do_not_change_the_files_they_start_from"}  # it hashes the image, which takes many minutes here


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only-driver", help="run only the tests that are parametrized with this driver")
    parser.addoption("--settled", type=Path, help="a file with the names of tests that have ended and do not run again")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--only-driver")
    settled = set(config.getoption("--settled").read_text().split("\n"))
    kept = [item for item in items if _driver(item) == wanted and item.nodeid not in settled]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=lambda item: getattr(item, "originalname", None) in LAST)
    _say("collected", count=len(kept))


def _driver(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("host") if callspec is not None else None


def pytest_runtest_logstart(nodeid: str) -> None:
    _say("started", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = "" if report.passed else report.longreprtext[-MAX_REASON:]
        _say(report.outcome, test=report.nodeid, when=report.when, seconds=round(report.duration, 1), reason=reason)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _say("ended", test=nodeid)


def pytest_sessionfinish() -> None:
    _say("finished")


def _say(what: str, **facts: object) -> None:
    line = json.dumps({"what": what, "at": round(time.monotonic()), **facts})
    print(f"\n{MARK}{line}", file=sys.__stdout__, flush=True)
