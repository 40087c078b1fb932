"""What a call has to do with a run: it waits for its turn, then for the result, or leaves the run in the background."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxBusy, SandboxChanging
from mcp_sandbox.runs.running import LiveRun
from mcp_sandbox.sandboxes.execution import CheckedRun, begin
from mcp_sandbox.sandboxes.lifecycle import Ending
from mcp_sandbox.sandboxes.sandbox import Sandbox
from mcp_sandbox.views import ErrorView, RunProgress, RunView

PROGRESS_EVERY_S = 1.0  # at most; a model reads the newest line, not all of them
SILENCE_S = 10.0  # after which a run without output is reported, too: some clients only want to see a sign of life

Report = Callable[[float, str], Awaitable[None]]  # seconds since the run began, its newest line


async def run_in_turn(
    box: Sandbox, request: CheckedRun, settings: Settings, until: float, report: Report | None
) -> RunView | RunProgress:
    """Run the code in `box` when its turn comes, and wait for the result, but not beyond `until`.

    A run that is still on then goes on in the background. A call that is cancelled has its code interrupted.

    Raises:
        SandboxBusy: another run is on, and does not end in time.
        SandboxError: the sandbox is over, or ended in the middle.
    """
    async with _turn(box, until):
        live = begin(box, request, settings)
        if until > anyio.current_time():  # who has no patience at all gets a run_id, however short the run is
            await _wait(live, until, report)
        if live.done.is_set():
            return outcome(box, live)
        live.background = True
        box.keep_on()
        return view(box, live, settings, 0)


async def _wait(live: LiveRun, until: float, report: Report | None) -> None:
    try:
        with anyio.CancelScope(deadline=until):
            async with _reported(live, report):
                await live.done.wait()
    except BaseException:
        live.stop()
        raise


async def read_on(
    box: Sandbox, run_id: str, settings: Settings, offset: int, wait_s: float, report: Report | None
) -> RunProgress:
    """A page of a run's output, waiting up to `wait_s` until the page is full or the run over.

    Raises:
        RunNotFound, SandboxError: there is nothing to read.
    """
    live = box.runs.find(box.id, run_id)
    with anyio.move_on_after(wait_s):
        async with _reported(live, report):
            await live.log.grown(offset + settings.output.page_bytes)
    return view(box, live, settings, offset)


async def stop(box: Sandbox, run_id: str) -> RunView:
    """Interrupt a run, or kill it, and return what came of it.

    Raises:
        RunNotFound, SandboxError: there is no such run, or it left no result.
    """
    live = box.runs.find(box.id, run_id)
    live.stop()
    await live.done.wait()
    return outcome(box, live)


def outcome(box: Sandbox, live: LiveRun) -> RunView:
    """The result of a run that is over."""
    if live.result is None:
        raise live.failure or box.error()
    box.loss_told(live)
    return live.result if box.one_off else live.result.model_copy(update={"expires_in_s": box.expires_in_s()})


def view(box: Sandbox, live: LiveRun, settings: Settings, offset: int) -> RunProgress:
    """Where a run stands, and its output from `offset` on."""
    if live.result is None and box.ending is not None:
        return lost_view(box.ending, live.id, settings, offset)
    result = outcome(box, live) if live.done.is_set() else None
    longest = max(live.fold.stdout.total, live.fold.stderr.total)
    return RunProgress(
        sandbox_id=box.id,
        run_id=live.id,
        page=live.log.page(offset, settings.output.page_bytes),
        elapsed_s=live.elapsed_s,
        left_s=max(0.0, live.timeout_s - live.elapsed_s),
        live_full=result is None and longest >= settings.output.live_bytes,
        result=result,
    )


def lost_view(ending: Ending, run_id: str, settings: Settings, offset: int) -> RunProgress:
    """What a run had written when its machine was lost.

    Raises:
        SandboxError: the sandbox ended in another way, or with another run.
    """
    run = ending.lost_run
    if run is None or run.id != run_id:
        raise ending.error()
    return RunProgress(
        sandbox_id=ending.sandbox_id,
        run_id=run.id,
        page=run.log.page(offset, settings.output.page_bytes),
        elapsed_s=run.elapsed_s,
        left_s=0.0,
        live_full=False,
        error=ErrorView.of(replace(ending, lost_run=None).error()),  # without advice to read what is read here
    )


def check_free(box: Sandbox) -> None:
    """See that the machine could be had for oneself, now or in a moment.

    Raises:
        SandboxBusy: a run is on.
        SandboxError: the sandbox is paused or over.
    """
    box.usable()
    if box.runs.current is not None and not box.runs.current.stopping:
        raise _busy(box)


@asynccontextmanager
async def between_runs(box: Sandbox) -> AsyncIterator[None]:
    """No run is on and none begins while the block lasts.

    Raises:
        SandboxBusy: one is on.
    """
    if box.runs.current is not None and not box.runs.current.stopping:
        raise _busy(box)
    async with _turn(box, math.inf):
        yield


@asynccontextmanager
async def _turn(box: Sandbox, until: float) -> AsyncIterator[None]:
    """The right to start a run: calls that wait for their runs take turns, and nobody waits for a background run."""
    try:
        box.turn.acquire_nowait()
    except anyio.WouldBlock:
        with anyio.CancelScope(deadline=until) as scope:
            await box.turn.acquire()
        if scope.cancelled_caught:
            raise _busy(box) from None
    try:
        if box.runs.current is not None and box.runs.current.stopping:  # its call was cancelled
            with anyio.CancelScope(deadline=until):
                await box.runs.current.done.wait()
        if box.runs.current is not None:
            raise _busy(box)
        yield
    finally:
        box.turn.release()


def _busy(box: Sandbox) -> SandboxBusy | SandboxChanging:
    live = box.runs.current
    return SandboxChanging(box.id) if live is None else SandboxBusy(box.id, live.id, live.elapsed_s)


@asynccontextmanager
async def _reported(live: LiveRun, report: Report | None) -> AsyncIterator[None]:
    """Tell the newest line while the block waits for the run."""
    if report is None:
        yield
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_follow, live, report)
        yield
        tasks.cancel_scope.cancel()


async def _follow(live: LiveRun, report: Report) -> None:
    while True:
        size = len(live.log)
        with anyio.move_on_after(SILENCE_S):
            await live.log.grown(size + 1)
        if live.done.is_set():
            return
        await report(live.elapsed_s, live.log.newest_line() or "running")
        await anyio.sleep(PROGRESS_EVERY_S)
