"""One step of a build: its result is found in the store or made now, and whoever waits can watch."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from guest.errors import GuestError
from templates.errors import BuildFailed
from templates.store import Entry, Store, key_of
from templates.tools import LoggedTools, StepFailed, Tools, tail
from vmm.errors import VmmError

Step = Literal[
    "base", "packages", "layers", "interpreter", "image", "tree", "kernel", "initramfs", "agent", "runsc", "snapshot"
]
State = Literal["started", "running", "done", "ready"]  # ready: was made before
MakeStep = Callable[[Tools, Path], Awaitable[Mapping[str, Any]]]
MakeTools = Callable[[Path, Callable[[str], None]], Tools]


@dataclass(frozen=True, slots=True)
class Progress:
    """Something to show to whoever waits for a build."""

    step: Step
    state: State
    message: str
    elapsed_s: float


class Steps:
    """Takes steps, one entry of the store each."""

    def __init__(self, store: Store, report: Callable[[Progress], None], make_tools: MakeTools = LoggedTools) -> None:
        self._store = store
        self._report = report
        self._make_tools = make_tools

    def ready(self, step: Step, kind: str, inputs: Mapping[str, Any]) -> Entry | None:
        """The result of a step that was taken before."""
        path = self._store.get(kind, inputs)
        if path is None:
            return None
        self._report(Progress(step, "ready", "made before", 0.0))
        return self._store.entry(path)

    async def take(self, step: Step, kind: str, inputs: Mapping[str, Any], make: MakeStep) -> Entry:
        """The result of one step, found or made; every failure becomes BuildFailed."""
        if found := self.ready(step, kind, inputs):
            return found
        started = time.monotonic()
        log_path = self._store.logs / f"{step}-{key_of(inputs)}.log"

        def tell(state: State, message: str) -> None:
            self._report(Progress(step, state, message, time.monotonic() - started))

        async def make_logged(staging: Path) -> Mapping[str, Any]:
            return await make(self._make_tools(log_path, partial(tell, "running")), staging)

        tell("started", "")
        try:
            path = await self._store.obtain(kind, inputs, make_logged)
        except (StepFailed, VmmError, GuestError, OSError, BaseExceptionGroup) as error:
            cause = innermost(error)
            if not isinstance(cause, StepFailed | VmmError | GuestError | OSError):
                raise
            raise BuildFailed(step, str(cause), log_tail=tail(log_path), log_path=log_path) from cause
        tell("done", "")
        return self._store.entry(path)


def innermost(error: BaseException) -> BaseException:
    """The first real error in a group of errors: the others only followed from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
