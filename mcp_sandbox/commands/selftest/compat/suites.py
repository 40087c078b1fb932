"""Other people's code in sandboxes: problems with known solutions, imports, and test suites of numpy and CPython."""

import re
from collections.abc import AsyncIterator
from functools import partial

from guest.places import WORKSPACE
from mcp_sandbox.commands.selftest.cases import Case, Check
from mcp_sandbox.commands.selftest.compat.material import Material
from mcp_sandbox.commands.selftest.compat.modules import LIBRARIES, STANDARD
from mcp_sandbox.commands.selftest.results import Outcome, broken, failed, held
from mcp_sandbox.commands.selftest.subject import OWNER, Box, Subject
from mcp_sandbox.views import RunView

SUITE_S = 600.0  # the longest time limit of a run; numpy's longest suite takes half of it
SUITE_MB = 4096  # some tests of numpy and of multiprocessing take more than 1 GB
PLACE = f"{WORKSPACE}/.compat"
UPLOAD_BYTES = 1024 * 1024
MAX_NAMED = 8  # failures in a detail
WRONG = ("failures", "errors", "unexpected successes")  # as unittest counts them

TOO_BIG = "test_big_arrays"  # writes 2 GB, more than a sandbox's disk has, and leaves the tests after it no room
NUMPY = ("_core", "fft", "lib", "linalg", "ma", "matrixlib", "polynomial", "random")
CPYTHON = (
    *("test_io", "test_mmap", "test_queue", "test_threading"),
    *("test_multiprocessing_fork", "test_multiprocessing_forkserver", "test_multiprocessing_main_handling"),
    "test_multiprocessing_spawn",
)
# Each module in a process of its own: together they would need more memory than a sandbox has.
IMPORT_ALL = """
import importlib, os, sys
missing = []
for name in {names!r}:
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{{name}}: {{error}}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        missing.append(name)
print("missing:", *missing)
"""
# A Python with the tests in its standard library: they start programs with `-E -S`, which look nowhere else.
OWN_PYTHON = f"""
lib=$(echo /usr/lib/python3.*/os.py) && lib=${{lib%/os.py}} && own=/tmp/own/lib/${{lib##*/}} &&
cp -rn $lib/test/. {PLACE}/test/ && mkdir -p /tmp/own/bin $own &&
cp $(readlink -f /usr/bin/python3) /tmp/own/bin/python &&
ln -s $lib/* $own/ && rm -f $own/test && mv {PLACE}/test $own/
"""
ADVICE = "Run it in the sandbox by hand (docs/operations.md), and report a bug if it works elsewhere."


def cases(material: Material) -> tuple[Case, ...]:
    """Return all checks of compatibility."""
    return (
        _case("HumanEval", "the known solutions of HumanEval pass", partial(solve_problems, material)),
        _case("imports", "the modules that people use can be imported", import_modules),
        *(
            _case("numpy", f"the tests of numpy.{name} pass", partial(run_numpy_tests, material, name))
            for name in NUMPY
        ),
        *(_case("CPython", f"CPython's {name} passes", partial(run_cpython_tests, material, name)) for name in CPYTHON),
    )


def _case(topic: str, name: str, check: Check) -> Case:
    return Case(topic, name, check, ADVICE, limit_s=SUITE_S + 60)


async def solve_problems(material: Material, subject: Subject) -> Outcome:
    """Run each solution with its tests, one after the other in one sandbox."""
    problems = material.problems()
    async with subject.fresh() as box:
        wrong = [problem.task_id for problem in problems if (await box.code(problem.program)).status != "ok"]
    return _verdict(len(problems) - len(wrong), wrong)


async def import_modules(subject: Subject) -> Outcome:
    """Import every module in a process of its own."""
    names = [*STANDARD.split(), *LIBRARIES.split()]
    async with subject.fresh() as box:
        run = await box.python(IMPORT_ALL.format(names=names), SUITE_S)
    found = re.search(r"^missing:(.*)$", run.stdout.head + run.stdout.tail, re.MULTILINE)
    if found is None:
        return failed(f"The imports ended with {run.status}: {run.stderr.tail or run.stderr.head}")
    missing = found[1].split()
    return _verdict(len(names) - len(missing), missing)


async def run_numpy_tests(material: Material, package: str, subject: Subject) -> Outcome:
    """Run the tests that a package of numpy brings along."""
    async with subject.fresh(SUITE_MB) as box:
        await _upload(box, material.runners())
        options = f"-q -p no:cacheprovider --tb=no -rfE -k 'not {TOO_BIG}'"
        line = f"cd /tmp && python3 -m pytest --pyargs numpy.{package} {options}"
        run = await box.command(line, SUITE_S, {"PYTHONPATH": f"{PLACE}/runners"})
    return pytest_outcome(run.stdout.head + run.stdout.tail) or failed(_ending(run))


async def run_cpython_tests(material: Material, module: str, subject: Subject) -> Outcome:
    """Run a module of CPython's own tests. It belongs into the package `test`, of which the image has only a part."""
    async with subject.fresh(SUITE_MB) as box:
        await _upload(box, material.cpython())
        prepared = await box.command(OWN_PYTHON)
        if prepared.status != "ok":
            return failed(_ending(prepared))
        summary = "grep -E '^(FAIL|ERROR): |^Ran |^OK|^FAILED'"
        line = f"cd /tmp && own/bin/python -m unittest test.{module} 2>&1 | tee test.log | {summary}"
        run = await box.command(f"{line} || tail -c 2000 test.log", SUITE_S)
    return unittest_outcome(run.stdout.head + run.stdout.tail) or failed(_ending(run))


def pytest_outcome(text: str) -> Outcome | None:
    """Return the verdict from the end of pytest's output; None if it did not come to an end."""
    last = text.strip().rpartition("\n")[2]
    counted = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    if not counted or " in " not in last:
        return None
    named = re.findall(r"^(?:FAILED|ERROR) \S*?::(\S+)", text, re.MULTILINE)
    return _verdict(counted.get("passed", 0), named, counted.get("failed", 0) + counted.get("error", 0))


def unittest_outcome(text: str) -> Outcome | None:
    """Return the verdict from the summary of unittest's output; None if it did not come to an end."""
    ran = re.search(r"^Ran (\d+) tests?", text, re.MULTILINE)
    if ran is None:
        return None
    ended = re.search(r"^(?:OK|FAILED)(?: \((.*)\))?$", text, re.MULTILINE)
    counts = dict(re.findall(r"(\w+)=(\d+)", ended[1] or "")) if ended else {"errors": "1"}
    wrong, skipped = (sum(int(counts.get(name, 0)) for name in names) for names in (WRONG, ("skipped",)))
    named = re.findall(r"^(?:FAIL|ERROR): (\S+)", text, re.MULTILINE)
    return _verdict(int(ran[1]) - skipped - wrong, named, wrong)


async def _upload(box: Box, archive: bytes) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(archive), UPLOAD_BYTES):
            yield archive[at : at + UPLOAD_BYTES]

    await box.service.unpack(OWNER, box.id, PLACE, parts())


def _verdict(right: int, named: list[str], wrong: int | None = None) -> Outcome:
    wrong = len(named) if wrong is None else wrong
    count = f"{right:,} of {right + wrong:,}"
    if not wrong:
        return held(count)
    more = f" and {wrong - MAX_NAMED} more" if wrong > MAX_NAMED else ""
    return broken(f"{count}; not {', '.join(named[:MAX_NAMED])}{more}")


def _ending(run: RunView) -> str:
    reason = run.error.message if run.error else run.stderr.tail or run.stderr.head or run.stdout.tail
    return f"The tests ended with {run.status} and no count: {reason[-300:]}"
