"""Test suites of this repository for one driver, inside the emulated host: real drivers under real KVM.

The host gets our packages, pytest and a home in which the template's image and kernel are built. Snapshots are made
inside, because they need its CPU. `emulated_report` prints what happens as lines of JSON.

Machines in it hang now and then (docs/specification.md), and take the host's only CPU with them. A host that says
nothing for too long is started again, without the tests that have ended.
"""

import compileall
import importlib.metadata
import json
import py_compile
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from packaging.requirements import Requirement

from templates.catalogue import FILE_NAME
from templates.chosen_program import FILE_NAME as PROGRAMS
from templates.model import Template
from templates.revisions import FILE_NAME as REVISIONS
from templates.store import Store
from tests.functional.checkout import REPO
from tests.functional.emulated_host import Hardware, emulated_host
from tests.functional.emulated_report import MARK
from vmm.errors import ToolFailed
from vmm.process import run_tool
from vmm.types import GuestKernel

ROOMS = ("guest", "mcp_sandbox", "templates", "tests", "vmm", "websearch")
TOOLS = ("pytest", "pytest-timeout", "pytest-rerunfailures", "hypothesis", "trustme")
HOME_DISK = "12G"  # sparse: the image, and what tests write
MEMORY = "6G"
SETTLED_BYTES = 1 << 16  # the list of tests that have ended, as a disk
SILENT_S = 900.0  # real time; the longest tests take half of it on a slow core
HANGS = 3  # of one test, which then has failed
STARTS = 30  # of the host, for one suite

RUN = """
mount -t ext4 /dev/vdc /srv && cd /host/python
export MCP_SANDBOX_HOME=/srv/home
python3 -P -m pytest -p tests.functional.emulated_report -o cache_dir=/srv/cache -q --color=no --tb=short \\
    --settled=/dev/vdd {words}
echo b >/proc/sysrq-trigger  # restart, which ends the host
"""


@dataclass(frozen=True, slots=True)
class Suite:
    """What is run: tests of some files, with one driver."""

    driver: str
    words: Sequence[str]  # of pytest's command line: files and options
    template: Template  # the host's default one, whatever its name is here
    image: Path  # of the template, in a store
    kernel: GuestKernel  # in the same store


@dataclass(slots=True)
class Progress:
    """What a suite has reported so far, from all starts of its host."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)  # the tests that need not run again
    finished: bool = False
    running: str | None = None
    hangs: Counter[str] = field(default_factory=Counter)

    def add(self, report: dict[str, Any]) -> None:
        self.reports.append(report)
        what = report["what"]
        if what in ("started", "ended", "finished") and self.running is not None:  # if its own end was lost
            self.settled.add(self.running)
            self.running = None
        match what:
            case "started":
                self.running = report["test"]
            case "ended":
                self.settled.add(report["test"])
            case "finished":
                self.finished = True

    def host_ended(self) -> None:
        """Note that the host hung or died before it had finished. What it has reported of the running test is void."""
        test, self.running = self.running, None
        if test is None:
            return
        self.reports = [report for report in self.reports if report.get("test") != test]
        self.hangs[test] += 1
        if self.hangs[test] == HANGS:
            reason = f"the host hung or died {HANGS} times in this test"
            self.reports.append({"what": "failed", "test": test, "reason": reason})
            self.settled.add(test)


async def run_suite(suite: Suite, store: Store, scratch: Path, on_line: Callable[[str], None]) -> Progress:
    """Boot the host, run the tests in it, and return what `emulated_report` says of each."""
    tree, home, settled = scratch / "tree", scratch / "home.ext4", scratch / "settled.txt"
    await anyio.to_thread.run_sync(_fill, tree, suite)
    await _make_home(scratch / "srv", home, store, suite)
    hardware = Hardware(MEMORY, own_time=True, disks=[home, settled])
    argv = await emulated_host(tree, store, suite.image, scratch, hardware)
    progress = Progress()
    for start in range(STARTS):
        settled.write_text("\n".join(progress.settled).ljust(SETTLED_BYTES, "\n"))
        before = len(progress.reports)
        await _run_host(argv, scratch, progress, on_line)
        said_something = len(progress.reports) > before
        progress.host_ended()
        if progress.finished or not said_something:  # it does not even collect tests: the next would not, either
            break
        on_line(f"the host ended early, start {start + 1}; hangs: {dict(progress.hangs)}")
    return progress


async def _run_host(argv: Sequence[str], scratch: Path, progress: Progress, on_line: Callable[[str], None]) -> None:
    """Run the host until it ends by itself, or is silent for too long."""
    with anyio.CancelScope(deadline=anyio.current_time() + SILENT_S) as scope:

        def heard(line: str) -> None:
            on_line(line)
            # The kernel's messages share the console: a line may be damaged, and says nothing about progress.
            with suppress(ValueError):
                if line.startswith(MARK):
                    progress.add(json.loads(line.removeprefix(MARK)))
                    scope.deadline = anyio.current_time() + SILENT_S

        try:
            await run_tool(argv, on_line=heard, env={"TMPDIR": str(scratch)})
        except ToolFailed as error:  # QEMU crashed
            on_line(error.gist)


def _fill(tree: Path, suite: Suite) -> None:
    python = tree / "python"
    for room in ROOMS:
        shutil.copytree(REPO / room, python / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", python)
    for distribution in distributions("mcp-sandbox", *TOOLS):
        for file in distribution.files or ():
            target = python / file
            if ".." not in file.parts and file.suffix != ".pyc" and not file.parts[0].startswith("_mcp_sandbox"):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    # Python need not compile what it imports. The host's clock and the files' times do not matter.
    compileall.compile_dir(python, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    shutil.copy(suite.template.folder / FILE_NAME, python / "templates" / suite.template.name)
    words = " ".join([f"--only-driver={suite.driver}", *suite.words])
    (tree / "run").write_text(RUN.format(words=words))


def distributions(*names: str) -> Iterator[importlib.metadata.Distribution]:
    """Find installed packages and everything that they need."""
    wanted, seen = list(names), set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        yield found
        for line in found.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}) or name == "pyjwt":  # its extra: crypto
                wanted.append(needed.name)


async def _make_home(folder: Path, disk: Path, store: Store, suite: Suite) -> None:
    """Write a disk with a product's home, in which the template is built but for its snapshot."""
    home = folder / "home"
    for entry in {file.parent for file in (suite.image, suite.kernel.vmlinuz, suite.kernel.initramfs)}:
        shutil.copytree(entry, home / entry.parent.name / entry.name, copy_function=_link)
    for name in (REVISIONS, PROGRAMS):
        if (store.home / name).is_file():
            shutil.copy(store.home / name, home)
    disk.touch()
    await run_tool(["truncate", "-s", HOME_DISK, str(disk)])
    await run_tool(["mkfs.ext4", "-q", "-d", str(folder), str(disk)])


def _link(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # another file system
        shutil.copy2(source, target)
