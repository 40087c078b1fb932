"""Executing one run in a sandbox: its deadline, how it is stopped, and its result."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import anyio

from guest.client.messages import Artifact, Finished
from guest.client.runs import Run
from guest.client.wire import one_line
from guest.errors import AgentTimeout, RequestRefused
from mcp_sandbox.config import OutputSettings
from mcp_sandbox.errors import BadRequest, FileError, RunRefused, SandboxError
from mcp_sandbox.machines.provider import Lease
from mcp_sandbox.runs.output import OutputLog
from mcp_sandbox.runs.requests import INTERRUPT_GRACE_S, CheckedRun
from mcp_sandbox.runs.results import Fold, HeadTail
from mcp_sandbox.runs.running import RunHandle
from mcp_sandbox.sandboxes.file_access import (
    FILE_TIMEOUT_S,
    MAX_REASON_CHARS,
    artifact_view,
    file_operation,
    image_mime,
    read_all,
)
from mcp_sandbox.sandboxes.sandbox import Sandbox
from mcp_sandbox.views import ImageView, RunTimings, RunView, StreamView, first_page, mime_of

LOG_SLACK_BYTES = 64 * 1024  # for notes in the log, and for invalid UTF-8, which takes three bytes once replaced
STOP_BOUND_S = INTERRUPT_GRACE_S + 8.0  # killing a kernel and forking the next takes seconds under emulation


def start(box: Sandbox, run: CheckedRun, output: OutputSettings, *, in_kernel: bool) -> RunHandle:
    """Start a run in `box`, beside others unless it needs the kernel. It continues in a task of the sandbox.

    Raises:
        SandboxError: the sandbox is paused or over.
    """
    ends = output.head_bytes, output.tail_bytes
    log = OutputLog(2 * (output.live_bytes + output.tail_bytes) + LOG_SLACK_BYTES)
    fold = Fold(HeadTail(*ends), HeadTail(*ends), log)
    stdin_open = run.request.stdin_open
    handle = RunHandle(box.runs.next_id(), run.timeout_s, fold, in_kernel=in_kernel, stdin_open=stdin_open)
    box.start_run(handle, lambda: _execute(box, handle, run, output))
    return handle


async def _execute(box: Sandbox, handle: RunHandle, run: CheckedRun, output: OutputSettings) -> None:
    try:
        handle.result = await _result(box, handle, run, output)
    except SandboxError as error:
        handle.failure = error


async def _result(box: Sandbox, handle: RunHandle, run: CheckedRun, output: OutputSettings) -> RunView:
    fold = handle.fold
    lost_before = box.take_unreported_loss()
    refused_before = box.network.refused
    async with box.use() as lease:
        with _refusals():
            async with lease.agent.run(run.message(lease.template, output)) as events:
                handle.sent, handle.events = True, events
                handle.begun.set()
                cut_short = await _drive(handle, events)
        ran_at = anyio.current_time()
        images = await _images(lease, fold.artifacts.values(), output)
        stdout, stderr = await _streams(lease, fold)
    finished = _finished(fold)
    box_id = None if box.one_off else box.id
    named = (artifact_view(artifact.path, artifact.size, box_id) for artifact in fold.artifacts.values())
    artifacts = first_page(named, output.page_bytes)
    return RunView(
        sandbox_id=box_id,
        run_id=handle.id,
        lost_before=lost_before,
        status=finished.status,
        timed_out_after_s=handle.timeout_s if cut_short and not handle.stopping else None,
        stopped=cut_short and handle.stopping,
        state=finished.state,
        exit_code=finished.exit_code,
        signal=finished.signal,
        error=finished.error,
        stdout=stdout,
        stderr=stderr,
        displays=tuple(fold.displays),
        displays_dropped=fold.displays_dropped + finished.output.displays_dropped,
        artifacts=tuple(artifacts),
        artifacts_complete=finished.artifacts_complete and len(artifacts) == len(fold.artifacts),
        images=images,
        timings=_timings(handle, run, lease, ran_at),
        report=fold.report,
        network_refusals=box.network.refusals_since(refused_before),
        service_loss=finished.service_loss,
        language=lease.template.language,
        kind=run.request.kind,
    )


def _timings(handle: RunHandle, run: CheckedRun, lease: Lease, ran_at: float) -> RunTimings:
    waited_s = lease.timings.queue_s if run.fresh else handle.began_at - run.asked_at
    return RunTimings(
        queue_ms=1000 * waited_s,
        restore_ms=1000 * lease.timings.restore_s if run.fresh else 0.0,
        run_ms=1000 * (ran_at - handle.began_at),
        total_ms=1000 * (anyio.current_time() - run.asked_at),
    )


@contextmanager
def _refusals() -> Iterator[None]:
    """Translate the agent's refusal to run the code."""
    try:
        yield
    except RequestRefused as refusal:
        reason = one_line(refusal.message, MAX_REASON_CHARS)
        if refusal.code in ("bad_request", "too_large"):
            raise BadRequest(f"{reason}.") from refusal
        raise RunRefused(reason) from refusal


async def _drive(handle: RunHandle, events: Run) -> bool:
    """Fold the run's events until it has finished. Return whether its deadline or a stop cut it short."""
    with handle.scope:
        await _drain(events, handle.fold)
        return False
    await _stop(events, handle.fold)
    return _finished(handle.fold).status not in ("ok", "exited")  # it may have ended in the same moment


async def _drain(events: Run, fold: Fold) -> None:
    async for event in events:
        fold.add(event)
    if fold.finished is None:
        raise AgentTimeout("the run's events ended without its result")


async def _stop(events: Run, fold: Fold) -> None:
    """Have the run interrupted, then killed, and fold its remaining events."""
    with anyio.move_on_after(STOP_BOUND_S):
        await events.stop()
        await _drain(events, fold)
        return
    raise AgentTimeout(f"a run that was stopped did not end within {STOP_BOUND_S:g} s")


async def _images(lease: Lease, artifacts: Collection[Artifact], output: OutputSettings) -> tuple[ImageView, ...]:
    """Read the run's new images, as many as a result may show and the time allows."""
    if not artifacts:
        return ()
    room = output.image_bytes
    images: list[ImageView] = []
    with anyio.move_on_after(FILE_TIMEOUT_S):
        for artifact in artifacts:
            if len(images) >= output.images:
                break
            if not mime_of(artifact.path).startswith("image/") or artifact.size > room:
                continue
            try:
                data = await read_all(lease.agent, artifact.path, room)
            except FileError:  # it was changed or removed since; the list of artifacts still names it
                continue
            shown_already = any(image.data == data for image in images)
            if (mime := image_mime(data)) and not shown_already:
                images.append(ImageView(path=artifact.path, mime_type=mime, data=data))
                room -= len(data)
    return tuple(images)


async def _streams(lease: Lease, fold: Fold) -> tuple[StreamView, StreamView]:
    """Return what is kept of stdout and stderr, and how much of each its file in the sandbox holds."""
    output = _finished(fold).output
    if output.spill_complete:
        return fold.stdout.captured(output.stdout_spill), fold.stderr.captured(output.stderr_spill)
    stdout = await _spill(lease, output.stdout_spill, output.stdout_bytes)
    stderr = await _spill(lease, output.stderr_spill, output.stderr_bytes)
    return fold.stdout.captured(*stdout), fold.stderr.captured(*stderr)


async def _spill(lease: Lease, path: str | None, total: int) -> tuple[str | None, int | None]:
    """Return the spill file of a stream, if it can be read, and its size if it is shorter than the stream."""
    if path is None:
        return None, None
    try:
        with file_operation(path):
            size = (await lease.agent.read(path, limit=1)).size
    except FileError:
        return None, None
    return path, size if size < total else None


def _finished(fold: Fold) -> Finished:
    assert fold.finished is not None, "a run is drained until it has finished"
    return fold.finished
