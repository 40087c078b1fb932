"""What a client's call does with a run: wait to start it, wait for its result, or leave it in the background."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import anyio

from guest.client.wire import one_line
from guest.errors import RequestRefused
from mcp_sandbox.config import OutputSettings
from mcp_sandbox.errors import SandboxBusy, SandboxChanging, StdinClosed, StdinFull
from mcp_sandbox.runs.requests import CheckedRun
from mcp_sandbox.runs.running import RunHandle
from mcp_sandbox.sandboxes.execution import start
from mcp_sandbox.sandboxes.file_access import MAX_REASON_CHARS
from mcp_sandbox.sandboxes.lifecycle import Ending
from mcp_sandbox.sandboxes.sandbox import Sandbox
from mcp_sandbox.views import ErrorView, RunProgress, RunView, SentInput

PROGRESS_EVERY_S = 1.0  # at most; a model reads the newest line, not all of them
TAKE_INPUT_S = 10.0  # for a run to read its input; what it then has not taken can be sent again
OVER = "it is over"
SILENCE_S = 10.0  # after which a run without output is reported too: some clients only need a sign of life

Report = Callable[[float, str], Awaitable[None]]  # seconds since the run began, its newest line


async def run_and_wait(
    box: Sandbox,
    run: CheckedRun,
    output: OutputSettings,
    until: float,
    report: Report | None,
    admit: Callable[[Sandbox], None],
) -> RunView | RunProgress:
    """Start a run in `box` and wait for its result, but not beyond `until`. Code first waits for other code.

    `admit` raises if no other run may start now. A run that is still active then continues in the background. A run
    whose call is cancelled is interrupted.

    Raises:
        SandboxBusy: other code is active and does not end in time.
        SandboxError: the sandbox is paused or over, or ended during the run.
    """
    in_kernel = _needs_kernel(box, run)
    async with _kernel(box, until) if in_kernel else nullcontext():
        async with _starting(box, until):
            admit(box)  # right before the start: other runs may have begun while this one waited
            handle = start(box, run, output, in_kernel=in_kernel)
        if until > anyio.current_time():  # else the client wants a run_id, however short the run is
            await _wait(handle, until, report)
        if handle.done.is_set():
            return _result(box, handle)
        handle.background = True
        box.outlive_run()
        return _view(box, handle, output, 0)


def _needs_kernel(box: Sandbox, run: CheckedRun) -> bool:
    lease = box.last_lease
    return run.request.kind != "command" and (lease is None or lease.template.language != "shell")


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
    """Return the output of a run that was active when its machine was lost.

    Raises:
        SandboxError: the sandbox ended in another way, or with another run.
    """
    run = next((run for run in ending.lost_runs if run.id == run_id), None)
    if run is None:
        raise ending.error()
    return RunProgress(
        sandbox_id=ending.sandbox_id,
        run_id=run.id,
        page=run.log.page(offset, output.page_bytes),
        elapsed_s=run.elapsed_s,
        left_s=0.0,
        live_full=False,
        error=ErrorView.of(replace(ending, lost_runs=()).error()),  # without the advice to read the output: this is it
    )


async def write_stdin(box: Sandbox, run_id: str, data: bytes, *, close: bool) -> SentInput:
    """Send input to a run, and wait until it has been taken. With `close`, no more follows.

    Raises:
        RunNotFound, SandboxError: there is no such run, or no longer.
        StdinClosed: it takes no input.
        StdinFull: it has not taken all of it in time.
    """
    handle = box.runs.find(box.id, run_id)
    taken = 0
    async with handle.input_lock, box.use():
        await handle.begun.wait()
        events = handle.events
        if events is None or not handle.stdin_open or not events.stdin_open:
            raise StdinClosed(box.id, run_id, _why_closed(handle))
        try:
            with anyio.move_on_after(TAKE_INPUT_S):
                while taken < len(data) and (size := await events.write(data[taken:])):
                    taken += size
            if taken == len(data) and close:
                await events.close_stdin()
        except RequestRefused as refusal:
            raise StdinClosed(box.id, run_id, one_line(refusal.message, MAX_REASON_CHARS)) from refusal
    if taken == len(data):
        return SentInput(sandbox_id=box.id, run_id=run_id, sent_bytes=taken, closed=close)
    if events.finished is not None:
        raise StdinClosed(box.id, run_id, OVER)
    raise StdinFull(box.id, run_id, taken, len(data))


def _why_closed(handle: RunHandle) -> str:
    if not handle.stdin_open:
        return "it was not started with stdin_open"
    return OVER if handle.done.is_set() else "its input was closed"


def check_no_run(box: Sandbox) -> None:
    """Check that no run is active, except those that are being stopped.

    Raises:
        SandboxBusy: a run is active.
    """
    if active := [run for run in box.runs.active.values() if not run.stopping]:
        raise _busy(box, active)


@asynccontextmanager
async def between_runs(box: Sandbox) -> AsyncIterator[None]:
    """Keep runs from starting during the block.

    Raises:
        SandboxBusy: a run is active.
    """
    check_no_run(box)
    async with _starting(box, math.inf):
        while box.runs.active:
            check_no_run(box)
            await next(iter(box.runs.active.values())).done.wait()
        yield


@asynccontextmanager
async def _kernel(box: Sandbox, until: float) -> AsyncIterator[None]:
    """Hold the kernel while no code is active in it.

    Calls that wait for their code hold it meanwhile, so the next call waits. A background run does not: the next call
    with code fails at once.
    """
    async with _locked(box, box.kernel_lock, until):
        run = box.runs.in_kernel
        if run is not None and run.stopping:  # its call was cancelled
            with anyio.CancelScope(deadline=until):
                await run.done.wait()
        if (run := box.runs.in_kernel) is not None:
            raise _busy(box, [run])
        yield


@asynccontextmanager
async def _starting(box: Sandbox, until: float) -> AsyncIterator[None]:
    """Start a run, or keep others from starting. It is held for long only while the sandbox is forked or paused."""
    async with _locked(box, box.start_lock, until):
        yield


@asynccontextmanager
async def _locked(box: Sandbox, lock: anyio.Lock, until: float) -> AsyncIterator[None]:
    """Hold one of the sandbox's locks. Raises SandboxBusy or SandboxChanging if it is not free in time."""
    try:
        lock.acquire_nowait()
    except anyio.WouldBlock:
        with anyio.CancelScope(deadline=until) as scope:
            await lock.acquire()
        if scope.cancelled_caught:
            run = box.runs.in_kernel if lock is box.kernel_lock else None
            raise _busy(box, [] if run is None else [run]) from None
    try:
        yield
    finally:
        lock.release()


def _busy(box: Sandbox, runs: list[RunHandle]) -> SandboxBusy | SandboxChanging:
    if not runs:
        return SandboxChanging(box.id)
    return SandboxBusy(box.id, runs[0].id, runs[0].elapsed_s, [run.id for run in runs[1:]])


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
