"""The session's own home, the order of tests, and the check that they leave nothing."""

from collections import Counter

import hypothesis
import pytest

from tests.session import TestSession

# The same examples in every run, however slow the host is: a failure can be repeated. Fuzzing differs, see
# tests/unit/fuzzing.py.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

SESSION = pytest.StashKey[TestSession]()
LEFTOVERS = pytest.StashKey[list[str]]()
# Guesses of how many minutes the longest groups take, see `_group`. They start first: else a worker is alone with one
# at the end. Only their order counts.
MINUTES = {
    "contract-qemu": 10,
    "test_emulated_host": 8,
    "security-qemu": 8,
    "security-gvisor": 7,
    "contract-gvisor": 6,
    "test_ordinary_user": 3,  # each of its tests
    "functional-qemu": 3,
    "security-bubblewrap": 3,
    "test_selftest": 3,
}
MAX_ID = 80  # characters or bytes of a parameter


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: some read settings then."""
    if (given := getattr(config, "workerinput", None)) is not None:
        config.stash[SESSION] = session = TestSession.of(given["session"])
        session.enter(given["workerid"])
        return
    config.stash[SESSION] = session = TestSession.begin()
    if not config.getoption("numprocesses", None):
        session.enter("main")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Hand the session to a worker of pytest-xdist."""
    node.workerinput["session"] = node.config.stash[SESSION].words()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (_stage(item), -_minutes(item)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
        if _stage(item):  # it can miss a time limit while machines start beside it
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name long parameters after their argument. Some are random, and all workers must find the same tests."""
    return argname if isinstance(val, (str, bytes)) and len(val) > MAX_ID else None


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(_stage(item) for item in session.items):
        session.config.stash[SESSION].link_builds()


@pytest.hookimpl(trylast=True)  # workers and fixtures have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    session.config.stash[LEFTOVERS] = left = session.config.stash[SESSION].leftovers()
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)  # what failed comes last, where it is seen
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section("skipped")
    for reason, count in skipped.most_common():
        terminalreporter.line(f"{count:4} {reason.removeprefix('Skipped: ')}")
    if left := terminalreporter.config.stash.get(LEFTOVERS, []):
        terminalreporter.section("left behind by the tests", red=True)
        for line in left:
            terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[SESSION].end()


def _stage(item: pytest.Item) -> int:
    """Fast tests come first, so that failures show early: units, then what needs no machine, then machines."""
    if "tests/unit/" in item.nodeid:
        return 0
    return 2 if item.get_closest_marker("vm") else 1


def _minutes(item: pytest.Item) -> int:
    return MINUTES.get(_group(item), MINUTES.get(item.path.stem, 0))


def _group(item: pytest.Item) -> str:
    """Tests for one worker: those of a driver share its loaded snapshot, the others of a file share fixtures.

    No group has tests of two stages: fixtures of machines live until the worker ends, and their event loop with them.
    Tests that start another one have to come first.
    """
    folder, callspec = item.path.parent.name, getattr(item, "callspec", None)
    if callspec is not None and "host" in callspec.params:
        return f"{folder}-{callspec.params['host']}"
    if item.path.stem == "test_ordinary_user":  # they take minutes and share nothing
        return item.nodeid
    return f"{folder}-{item.path.stem}-{_stage(item)}"
