"""Run the steps of a build: find each result in the store or make it, and report progress."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from guest.errors import GuestError, first_error
from templates.disk import MAX_STEP, require_free, run_bounded
from templates.errors import BuildFailed
from templates.store import Entry, Store, key_of
from templates.tools import LoggedTools, StepFailed, Tools, tail
from vmm.errors import VmmError

Step = Literal[
    "base", "packages", "layers", "interpreter", "image", "tree", "kernel", "initramfs", "agent", "program", "snapshot"
]
State = Literal["started", "running", "done", "ready"]  # ready: found in the store
MakeStep = Callable[[Tools, Path], Awaitable[Mapping[str, Any]]]
MakeTools = Callable[[Path, Callable[[str], None]], Tools]


@dataclass(frozen=True, slots=True)
class Progress:
    """A progress report of a build."""

    step: Step
    state: State
    message: str
    elapsed_s: float


class Steps:
    """Runs build steps. Each makes one store entry."""

    def __init__(self, store: Store, report: Callable[[Progress], None], make_tools: MakeTools = LoggedTools) -> None:
        self._store = store
        self._report = report
        self._make_tools = make_tools

    def find(self, step: Step, kind: str, inputs: Mapping[str, Any]) -> Entry | None:
        """Return the step's result if the store has it."""
        entry = self._store.find(kind, inputs)
        if entry is not None:
            self._report(Progress(step, "ready", "already built", 0.0))
        return entry

    async def run(self, step: Step, kind: str, inputs: Mapping[str, Any], make: MakeStep) -> Entry:
        """Return the step's result, found or made; every failure becomes BuildFailed."""
        if found := self.find(step, kind, inputs):
            return found
        started = time.monotonic()
        log_path = self._store.logs / f"{step}-{key_of(inputs)}.log"

        def report(state: State, message: str = "") -> None:
            self._report(Progress(step, state, message, time.monotonic() - started))

        async def make_logged(staging: Path) -> Mapping[str, Any]:
            require_free(staging, 0, f"step {step!r}")
            tools = self._make_tools(log_path, partial(report, "running"))
            return await run_bounded(staging, MAX_STEP, "its files are", partial(make, tools, staging))

        report("started")
        try:
            entry = await self._store.obtain(kind, inputs, make_logged)
        except (StepFailed, VmmError, GuestError, OSError, BaseExceptionGroup) as error:
            cause = first_error(error)
            if not isinstance(cause, StepFailed | VmmError | GuestError | OSError):
                raise
            raise BuildFailed(step, str(cause), log_tail=tail(log_path), log_path=log_path) from cause
        report("done")
        return entry
