"""One run in one sandbox: the deadline, the way it is stopped, and the result it leaves."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from guest.client.messages import Artifact, Finished, RunCode, RunKind
from guest.client.runs import Run
from guest.errors import AgentTimeout, RequestRefused
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest, FileError, InputTooLarge, RunRefused, SandboxError
from mcp_sandbox.machines.provider import Lease
from mcp_sandbox.runs.invocations import check_invocation, with_limits
from mcp_sandbox.runs.output import OutputLog
from mcp_sandbox.runs.results import Fold, HeadTail, RunRequest
from mcp_sandbox.runs.running import LiveRun
from mcp_sandbox.sandboxes.file_access import FILE_TIMEOUT_S, file_operation, image_mime, read_all
from mcp_sandbox.sandboxes.sandbox import Sandbox
from mcp_sandbox.views import ArtifactView, ImageView, RunTimings, RunView, StreamView, file_uri

INTERRUPT_GRACE_S = 2.0  # what an interrupted run gets to end by itself before its kernel is killed
LOG_SLACK_BYTES = 64 * 1024  # for notes in the log, and characters that were not UTF-8 and take three bytes now
STOP_BOUND_S = INTERRUPT_GRACE_S + 8.0  # killing a kernel and forking the next takes seconds under emulation


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A request that can be carried out."""

    code: str
    timeout_s: float
    fresh: bool  # its sandbox was made for it
    asked_at: float
    kind: RunKind = "code"
    options: Mapping[str, Any] | None = None


def check(request: RunRequest, settings: Settings, default_timeout_s: float) -> CheckedRun:
    """The request with its defaults filled in.

    Raises:
        BadRequest: it cannot be carried out by any sandbox.
    """
    what = "command" if request.kind == "command" else "code"
    if request.kind == "invoke":
        check_invocation(request, settings.runs.max_code_bytes)
    elif not request.code.strip():
        raise BadRequest(f"The {what} is empty. Give the {'command' if what == 'command' else 'source'} to run.")
    if "\0" in request.code:
        raise BadRequest(f"The {what} contains a null byte. Remove it.")
    if len(request.code.encode(errors="replace")) > settings.runs.max_code_bytes:
        raise InputTooLarge(f"The {what} has more than {settings.runs.max_code_bytes:,} bytes.")
    if request.sandbox_id is not None and request.template is not None:
        raise BadRequest("Give sandbox_id or template, not both: a sandbox keeps its template.")
    timeout_s = default_timeout_s if request.timeout_s is None else request.timeout_s
    if not 0 < timeout_s <= settings.runs.max_timeout_s:
        raise BadRequest(f"timeout_s must be greater than 0 and at most {settings.runs.max_timeout_s:g}.")
    fresh = request.sandbox_id is None
    return CheckedRun(request.code, timeout_s, fresh, anyio.current_time(), request.kind, request.options)


def begin(box: Sandbox, request: CheckedRun, settings: Settings) -> LiveRun:
    """Start a run in `box`, which must be free. It goes on in a task of the sandbox, whoever waits for it.

    Raises:
        SandboxError: the sandbox is over.
    """
    ends = settings.output.head_bytes, settings.output.tail_bytes
    log = OutputLog(2 * (settings.output.live_bytes + settings.output.tail_bytes) + LOG_SLACK_BYTES)
    live = LiveRun(box.runs.next_id(), request.timeout_s, Fold(HeadTail(*ends), HeadTail(*ends), log))
    box.start_run(live, lambda: _carry_out(box, live, request, settings))
    return live


async def _carry_out(box: Sandbox, live: LiveRun, request: CheckedRun, settings: Settings) -> None:
    try:
        live.result = await _run(box, live, request, settings)
    except SandboxError as error:
        live.failure = error


async def _run(box: Sandbox, live: LiveRun, request: CheckedRun, settings: Settings) -> RunView:
    fold = live.fold
    lost_before = box.take_loss()
    async with box.use() as lease:
        options = request.options
        if request.kind == "invoke":
            options = with_limits(request.options, lease.template, request.timeout_s)
        code = RunCode(
            request.code,
            kind=request.kind,
            options=options,
            grace_s=INTERRUPT_GRACE_S,
            head_bytes=settings.output.live_bytes,
            tail_bytes=settings.output.tail_bytes,
        )
        with _refusals():
            async with lease.agent.run(code) as run:
                live.sent = True
                cut_short = await _drive(live, run)
        ran_at = anyio.current_time()
        images = await _images(lease, fold.artifacts.values(), settings)
        stdout, stderr = await _streams(lease, fold)
    finished = _finished(fold)
    return RunView(
        sandbox_id=None if box.one_off else box.id,
        run_id=live.id,
        lost_before=lost_before,
        status=finished.status,
        timed_out_after_s=live.timeout_s if cut_short and not live.stopping else None,
        stopped=cut_short and live.stopping,
        state=finished.state,
        exit_code=finished.exit_code,
        signal=finished.signal,
        error=finished.error,
        stdout=stdout,
        stderr=stderr,
        displays=tuple(fold.displays),
        displays_dropped=fold.displays_dropped + finished.output.displays_dropped,
        artifacts=tuple(_artifact(artifact, None if box.one_off else box.id) for artifact in fold.artifacts.values()),
        images=images,
        timings=_timings(live, request, lease, ran_at),
        report=fold.report,
        service_loss=finished.service_loss,
        language=lease.template.language,
        kind=request.kind,
    )


def _timings(live: LiveRun, request: CheckedRun, lease: Lease, ran_at: float) -> RunTimings:
    waited_s = lease.timings.queue_s if request.fresh else live.began_at - request.asked_at
    return RunTimings(
        queue_ms=1000 * waited_s,
        restore_ms=1000 * lease.timings.restore_s if request.fresh else 0.0,
        run_ms=1000 * (ran_at - live.began_at),
        total_ms=1000 * (anyio.current_time() - request.asked_at),
    )


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except RequestRefused as refusal:
        if refusal.code in ("bad_request", "too_large"):
            raise BadRequest(f"{refusal.message}.") from refusal
        raise RunRefused(refusal.message) from refusal


async def _drive(live: LiveRun, run: Run) -> bool:
    """Take the run's events until it has finished; True if its deadline or somebody's wish ended it."""
    with live.scope:
        await _drain(run, live.fold)
        return False
    await _stop(run, live.fold)
    return _finished(live.fold).status not in ("ok", "exited")  # it may have been done just then


async def _drain(run: Run, fold: Fold) -> None:
    async for event in run:
        fold.add(event)
    if fold.finished is None:
        raise AgentTimeout("the run's events ended without its result")


async def _stop(run: Run, fold: Fold) -> None:
    """Interrupt the run, then have it killed, and take what it still says."""
    with anyio.move_on_after(STOP_BOUND_S):
        await run.stop()
        await _drain(run, fold)
        return
    raise AgentTimeout(f"a run that was stopped did not end within {STOP_BOUND_S:g} s")


def _artifact(artifact: Artifact, sandbox_id: str | None) -> ArtifactView:
    return ArtifactView(
        path=artifact.path,
        size=artifact.size,
        mime_type=artifact.mime_type,
        uri=None if sandbox_id is None else file_uri(sandbox_id, artifact.path),
    )


async def _images(lease: Lease, artifacts: Iterable[Artifact], settings: Settings) -> tuple[ImageView, ...]:
    """The run's new images, as many as may be shown at once and come in time."""
    room = settings.output.image_bytes
    images: list[ImageView] = []
    with anyio.move_on_after(FILE_TIMEOUT_S):
        for artifact in artifacts:
            if len(images) >= settings.output.images:
                break
            if not artifact.mime_type.startswith("image/") or artifact.size > room:
                continue
            try:
                data = await read_all(lease.agent, artifact.path, room)
            except FileError:  # it changed or went away since; the list of artifacts still names it
                continue
            if mime := image_mime(data):
                images.append(ImageView(path=artifact.path, mime_type=mime, data=data))
                room -= len(data)
    return tuple(images)


async def _streams(lease: Lease, fold: Fold) -> tuple[StreamView, StreamView]:
    """What is kept of stdout and stderr, and how much of each its file in the sandbox holds."""
    output = _finished(fold).output
    if output.spill_complete:
        return fold.stdout.captured(output.stdout_spill), fold.stderr.captured(output.stderr_spill)
    stdout = await _held(lease, output.stdout_spill, output.stdout_bytes)
    stderr = await _held(lease, output.stderr_spill, output.stderr_bytes)
    return fold.stdout.captured(*stdout), fold.stderr.captured(*stderr)


async def _held(lease: Lease, spill: str | None, total: int) -> tuple[str | None, int | None]:
    """A spill file, and its length if that is not the stream's; nothing if there is none to be read."""
    if spill is None:
        return None, None
    try:
        with file_operation(spill):
            size = (await lease.agent.read(spill, limit=1)).size
    except FileError:
        return None, None
    return spill, size if size < total else None


def _finished(fold: Fold) -> Finished:
    assert fold.finished is not None, "a run is drained until it has finished"
    return fold.finished
