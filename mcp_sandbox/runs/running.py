"""Bookkeeping of runs: the active ones of a sandbox, and finished ones whose results are kept."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import anyio

from guest.client.reports import CompiledReport
from mcp_sandbox.errors import RunNotFound, RunResultDropped, SandboxError
from mcp_sandbox.runs.output import OutputLog
from mcp_sandbox.runs.results import Fold, HeadTail

if TYPE_CHECKING:
    from guest.client.runs import Run
    from mcp_sandbox.views import RunView

PREFIX = "run-"  # of run ids; the number counts the runs of a sandbox
PART_BYTES = 1024  # of Python's memory for each part of a result, besides its text


class RunHandle:
    """One run from its start to its result. It does not depend on the call that started it."""

    def __init__(
        self, run_id: str, timeout_s: float, fold: Fold, *, in_kernel: bool = True, stdin_open: bool = False
    ) -> None:
        self.id = run_id
        self.in_kernel = in_kernel  # it runs code, one after the other; commands run beside each other
        self.stdin_open = stdin_open  # it takes input until that is closed
        self.input_lock = anyio.Lock()  # held to send input: what several calls send does not mix
        self.timeout_s = timeout_s
        self.fold = fold
        self.began_at = anyio.current_time()
        self.ended_at: float | None = None
        self.background = False  # its call no longer waits for it
        self.stopping = False
        self.sent = False  # the machine has received the code and may have run some of it
        self.result: RunView | None = None
        self.failure: SandboxError | None = None
        self.done = anyio.Event()
        self.begun = anyio.Event()  # `events` is there, or never will be
        self.events: Run | None = None  # while the machine runs it
        self.scope = anyio.CancelScope(deadline=self.began_at + timeout_s)  # its only deadline, and how it is stopped

    @property
    def log(self) -> OutputLog:
        """Its output so far."""
        return self.fold.log

    @property
    def elapsed_s(self) -> float:
        """How long it has been running, or took."""
        return (anyio.current_time() if self.ended_at is None else self.ended_at) - self.began_at

    @property
    def outcome(self) -> str:
        """How it ended, as a label for metrics."""
        if self.result is None:
            return "lost"
        if self.result.timed_out_after_s is not None:
            return "timeout"
        return "stopped" if self.result.stopped else self.result.status

    def stop(self) -> None:
        """Have the code interrupted, and killed if it does not react. The run still ends with a result."""
        if not self.done.is_set():
            self.stopping = True
            self.scope.cancel()

    def finish(self) -> None:
        """Mark the run as over, with a result or without. What is not in the result is forgotten, except the log."""
        self.ended_at = anyio.current_time()
        self.log.close()
        self.fold = Fold(HeadTail(0, 0), HeadTail(0, 0), self.log)
        self.events = None
        self.begun.set()
        self.done.set()

    @cached_property
    def kept_bytes(self) -> int:
        """Roughly how much memory its log and its whole result take, once it is over."""
        result = self.result
        if result is None:
            return len(self.log)
        images = sum(len(image.data) for image in result.images)
        parts = len(result.artifacts) + len(result.displays)
        parts += len(result.report.cases) if isinstance(result.report, CompiledReport) else 0
        return len(self.log) + images + len(result.model_dump_json(exclude={"images"})) + PART_BYTES * parts


@dataclass(frozen=True, slots=True)
class LostRun:
    """A run that was active when its machine was lost."""

    id: str
    log: OutputLog
    elapsed_s: float


class RunHistory:
    """The runs of one sandbox: the active ones, and the newest finished ones."""

    def __init__(self, max_runs: int, max_bytes: int) -> None:
        self.active: dict[str, RunHandle] = {}  # by id, oldest first
        self._max_runs = max_runs
        self._max_bytes = max_bytes
        self._count = 0
        self._kept: OrderedDict[str, RunHandle] = OrderedDict()

    @property
    def in_kernel(self) -> RunHandle | None:
        """The active run that has the kernel."""
        return next((run for run in self.active.values() if run.in_kernel), None)

    def next_id(self) -> str:
        """Return an id that no other run of this sandbox has."""
        self._count += 1
        return f"{PREFIX}{self._count}"

    def keep(self, run: RunHandle) -> None:
        """Keep a finished run, and drop the oldest ones that leave no room for it."""
        self._kept[run.id] = run
        while len(self._kept) > 1 and not self._fits():
            self._kept.popitem(last=False)

    def find(self, sandbox_id: str, run_id: str) -> RunHandle:
        """Return the run with this id.

        Raises:
            RunNotFound: there was none, or its result is no longer kept.
        """
        if run_id in self.active:
            return self.active[run_id]
        if run_id in self._kept:
            return self._kept[run_id]
        number = run_id.removeprefix(PREFIX)
        over = number.isdecimal() and 0 < int(number) <= self._count
        raise RunResultDropped(sandbox_id, run_id, self._max_runs) if over else RunNotFound(sandbox_id, run_id)

    def _fits(self) -> bool:
        size = sum(run.kept_bytes for run in self._kept.values())
        return len(self._kept) <= self._max_runs and size <= self._max_bytes
