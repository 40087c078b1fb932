"""What a client's call does with a run: wait to start it, wait for its result, or leave it in the background."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from mcp_sandbox.config import OutputSettings
from mcp_sandbox.errors import SandboxBusy, SandboxChanging
from mcp_sandbox.runs.requests import CheckedRun
from mcp_sandbox.runs.running import RunHandle
from mcp_sandbox.sandboxes.execution import start
from mcp_sandbox.sandboxes.lifecycle import Ending
from mcp_sandbox.sandboxes.sandbox import Sandbox
from mcp_sandbox.views import ErrorView, RunProgress, RunView

PROGRESS_EVERY_S = 1.0  # at most; a model reads the newest line, not all of them
SILENCE_S = 10.0  # after which a run without output is reported too: some clients only need a sign of life

Report = Callable[[float, str], Awaitable[None]]  # seconds since the run began, its newest line


async def run_and_wait(
    box: Sandbox,
    run: CheckedRun,
    output: OutputSettings,
    until: float,
    report: Report | None,
    admit: Callable[[str], None],
) -> RunView | RunProgress:
    """Start a run in `box` once no other run is active, and wait for its result, but not beyond `until`.

    `admit` raises if the owner may start none now. A run that is still active then continues in the background. A run
    whose call is cancelled is interrupted.

    Raises:
        SandboxBusy: another run is active and does not end in time.
        SandboxError: the sandbox is paused or over, or ended during the run.
    """
    async with _no_run(box, until):
        admit(box.owner)  # right before the start: other runs may have begun while this one waited
        handle = start(box, run, output)
        if until > anyio.current_time():  # else the client wants a run_id, however short the run is
            await _wait(handle, until, report)
        if handle.done.is_set():
            return _result(box, handle)
        handle.background = True
        box.outlive_run()
        return _view(box, handle, output, 0)


async def _wait(handle: RunHandle, until: float, report: Report | None) -> None:
    try:
        with anyio.CancelScope(deadline=until):
            async with _reporting(handle, report):
                await handle.done.wait()
    except BaseException:
        handle.stop()
        raise


async def read_output(
    box: Sandbox,
    run_id: str,
    output: OutputSettings,
    offset: int,
    wait_s: float,
    report: Report | None,
    *,
    full_page: bool = True,
) -> RunProgress:
    """Return a page of a run's output. Wait up to `wait_s` until the page is full or the run over.

    Without `full_page`, any output is enough.

    Raises:
        RunNotFound, SandboxError: there is nothing to read.
    """
    handle = box.runs.find(box.id, run_id)
    with anyio.move_on_after(wait_s):
        async with _reporting(handle, report):
            await handle.log.grown(offset + (output.page_bytes if full_page else 1))
    return _view(box, handle, output, offset)


async def stop_run(box: Sandbox, run_id: str) -> RunView:
    """Interrupt a run, or kill it, and return its result.

    Raises:
        RunNotFound, SandboxError: there is no such run, or it has no result.
    """
    handle = box.runs.find(box.id, run_id)
    handle.stop()
    await handle.done.wait()
    return _result(box, handle)


def _result(box: Sandbox, handle: RunHandle) -> RunView:
    """Return the result of a run that is over."""
    if handle.result is None:
        raise handle.failure or box.error()
    box.loss_reported(handle)
    return handle.result if box.one_off else handle.result.model_copy(update={"expires_in_s": box.expires_in_s()})


def _view(box: Sandbox, handle: RunHandle, output: OutputSettings, offset: int) -> RunProgress:
    """Return the state of a run, and its output from `offset` on."""
    if handle.result is None and box.ending is not None:
        return lost_view(box.ending, handle.id, output, offset)
    result = _result(box, handle) if handle.done.is_set() else None
    longest = max(handle.fold.stdout.total, handle.fold.stderr.total)
    return RunProgress(
        sandbox_id=box.id,
        run_id=handle.id,
        page=handle.log.page(offset, output.page_bytes),
        elapsed_s=handle.elapsed_s,
        left_s=max(0.0, handle.timeout_s - handle.elapsed_s),
        live_full=result is None and longest >= output.live_bytes,
        result=result,
    )


def lost_view(ending: Ending, run_id: str, output: OutputSettings, offset: int) -> RunProgress:
    """Return the output of the run that was active when its machine was lost.

    Raises:
        SandboxError: the sandbox ended in another way, or with another run.
    """
    run = ending.lost_run
    if run is None or run.id != run_id:
        raise ending.error()
    return RunProgress(
        sandbox_id=ending.sandbox_id,
        run_id=run.id,
        page=run.log.page(offset, output.page_bytes),
        elapsed_s=run.elapsed_s,
        left_s=0.0,
        live_full=False,
        error=ErrorView.of(replace(ending, lost_run=None).error()),  # without the advice to read the output: this is it
    )


def check_no_run(box: Sandbox) -> None:
    """Check that no run is active, except one that is being stopped.

    Raises:
        SandboxBusy: a run is active.
    """
    if box.runs.current is not None and not box.runs.current.stopping:
        raise _busy(box)


@asynccontextmanager
async def between_runs(box: Sandbox) -> AsyncIterator[None]:
    """Keep runs from starting during the block.

    Raises:
        SandboxBusy: a run is active.
    """
    check_no_run(box)
    async with _no_run(box, math.inf):
        yield


@asynccontextmanager
async def _no_run(box: Sandbox, until: float) -> AsyncIterator[None]:
    """Hold the run lock while no run is active.

    Calls that wait for their runs hold the lock meanwhile, so the next call waits. A background run does not hold it:
    the next call fails at once.
    """
    try:
        box.run_lock.acquire_nowait()
    except anyio.WouldBlock:
        with anyio.CancelScope(deadline=until) as scope:
            await box.run_lock.acquire()
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
        box.run_lock.release()


def _busy(box: Sandbox) -> SandboxBusy | SandboxChanging:
    run = box.runs.current
    return SandboxChanging(box.id) if run is None else SandboxBusy(box.id, run.id, run.elapsed_s)


@asynccontextmanager
async def _reporting(handle: RunHandle, report: Report | None) -> AsyncIterator[None]:
    """Report the run's newest line now and then during the block."""
    if report is None:
        yield
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_report_progress, handle, report)
        yield
        tasks.cancel_scope.cancel()


async def _report_progress(handle: RunHandle, report: Report) -> None:
    while True:
        size = len(handle.log)
        with anyio.move_on_after(SILENCE_S):
            await handle.log.grown(size + 1)
        if handle.done.is_set():
            return
        await report(handle.elapsed_s, handle.log.newest_line() or "running")
        await anyio.sleep(PROGRESS_EVERY_S)
