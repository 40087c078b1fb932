"""One run in one sandbox: the deadline, the way it is stopped, and the result it leaves."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from guest.client.messages import Artifact, Finished, RunCode
from guest.client.runs import Run
from guest.errors import AgentTimeout, RequestRefused
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import NEXT_CREATE, BadRequest, FileProblem, SandboxError
from mcp_sandbox.files import FILE_TIMEOUT_S, file_operation, image_mime, read_all
from mcp_sandbox.provider import Lease
from mcp_sandbox.runs import Captured, Fold, HeadTail, Picture, RunRequest, RunResult, RunTimings
from mcp_sandbox.sandbox import Sandbox, State

INTERRUPT_GRACE_S = 2.0  # what an interrupted run gets to end by itself before its kernel is killed
STOP_BOUND_S = INTERRUPT_GRACE_S + 8.0  # killing a kernel and forking the next takes seconds under emulation
CANCEL_BOUND_S = INTERRUPT_GRACE_S + 1.0  # a server told to stop must be gone after 5 s, so no longer than this


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A request that can be carried out."""

    code: str
    timeout_s: float
    fresh: bool  # its sandbox was made for it and ends with it
    asked_at: float


def check(request: RunRequest, settings: Settings) -> CheckedRun:
    """The request with its defaults filled in.

    Raises:
        BadRequest: it cannot be carried out by any sandbox.
    """
    if not request.code.strip():
        raise BadRequest("The code is empty. Give the source to run.")
    if "\0" in request.code:
        raise BadRequest("The code contains a null byte. Remove it; write_file takes binary data as base64.")
    if len(request.code.encode(errors="replace")) > settings.max_code_bytes:
        raise BadRequest(
            f"The code has more than {settings.max_code_bytes:,} bytes. Put data into a file with write_file."
        )
    if request.sandbox_id is not None and request.template is not None:
        raise BadRequest("Give sandbox_id or template, not both: a sandbox keeps the template it was made from.")
    timeout_s = settings.run_timeout_s if request.timeout_s is None else request.timeout_s
    if not 0 < timeout_s <= settings.max_run_timeout_s:
        raise BadRequest(f"timeout_s must be greater than 0 and at most {settings.max_run_timeout_s:g}.")
    return CheckedRun(request.code, timeout_s, request.sandbox_id is None, anyio.current_time())


async def run_in(box: Sandbox, request: CheckedRun, settings: Settings) -> RunResult:
    """Run the code in `box` when its turn comes.

    Raises:
        SandboxError: the sandbox is over, or ended in the middle.
    """
    ends = settings.output_head_bytes, settings.output_tail_bytes
    fold = Fold(HeadTail(*ends), HeadTail(*ends))
    async with box.use() as lease, box.run_lock:
        began_at = anyio.current_time()
        lost_before, box.state_lost = box.state_lost, False
        code = RunCode(request.code, grace_s=INTERRUPT_GRACE_S, head_bytes=ends[0], tail_bytes=ends[1])
        with _refusals():
            async with lease.agent.run(code) as run:
                timed_out = await _drive(box, run, fold, request.timeout_s)
        ran_at = anyio.current_time()
        pictures = await _pictures(lease, fold.artifacts.values(), settings)
        stdout, stderr = await _streams(lease, fold)
    waited_s = lease.timings.queue_s if request.fresh else began_at - request.asked_at
    timings = RunTimings(
        queue_ms=1000 * waited_s,
        restore_ms=1000 * lease.timings.restore_s if request.fresh else 0.0,
        run_ms=1000 * (ran_at - began_at),
        total_ms=1000 * (anyio.current_time() - request.asked_at),
    )
    return _result(
        fold,
        stdout,
        stderr,
        sandbox_id=None if request.fresh else box.id,
        lost_before=lost_before,
        timed_out_after_s=request.timeout_s if timed_out else None,
        pictures=pictures,
        timings=timings,
    )


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except RequestRefused as refusal:
        raise SandboxError(f"The sandbox could not run the code: {refusal.message}. {NEXT_CREATE}") from refusal


async def _drive(box: Sandbox, run: Run, fold: Fold, timeout_s: float) -> bool:
    """Take the run's events until it has finished; True if its deadline ended it."""
    try:
        with anyio.move_on_after(timeout_s):
            await _drain(run, fold)
            return False
        await _stop(run, fold, STOP_BOUND_S)
    except anyio.get_cancelled_exc_class():
        # When only the call is cancelled the sandbox lives on, and the next run must find its kernel free.
        if box.state is State.READY:
            try:
                await _stop(run, fold, CANCEL_BOUND_S)
                box.state_lost |= _finished(fold).state == "lost"
            except Exception as error:
                box.end(State.LOST, f"a cancelled run could not be stopped: {error}")
        raise
    return _finished(fold).status not in ("ok", "exited")  # it may have been done just then


async def _drain(run: Run, fold: Fold) -> None:
    async for event in run:
        fold.add(event)
    if fold.finished is None:
        raise AgentTimeout("the run's events ended without its result")


async def _stop(run: Run, fold: Fold, bound_s: float) -> None:
    """Interrupt the run, then have it killed, and take what it still says."""
    with anyio.move_on_after(bound_s, shield=True):
        await run.stop()
        await _drain(run, fold)
        return
    raise AgentTimeout(f"a run that was stopped did not end within {bound_s:g} s")


async def _pictures(lease: Lease, artifacts: Iterable[Artifact], settings: Settings) -> tuple[Picture, ...]:
    """The run's new images, as many as may be shown at once and come in time."""
    room = settings.inline_image_bytes
    pictures: list[Picture] = []
    with anyio.move_on_after(FILE_TIMEOUT_S):
        for artifact in artifacts:
            if len(pictures) >= settings.inline_images:
                break
            if not artifact.mime_type.startswith("image/") or artifact.size > room:
                continue
            try:
                data = await read_all(lease.agent, artifact.path, room)
            except FileProblem:  # it changed or went away since; the list of artifacts still names it
                continue
            if mime := image_mime(data):
                pictures.append(Picture(artifact.path, mime, data))
                room -= len(data)
    return tuple(pictures)


async def _streams(lease: Lease, fold: Fold) -> tuple[Captured, Captured]:
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
    except FileProblem:
        return None, None
    return spill, size if size < total else None


def _finished(fold: Fold) -> Finished:
    assert fold.finished is not None, "a run is drained until it has finished"
    return fold.finished


def _result(
    fold: Fold,
    stdout: Captured,
    stderr: Captured,
    *,
    sandbox_id: str | None,
    lost_before: bool,
    timed_out_after_s: float | None,
    pictures: tuple[Picture, ...],
    timings: RunTimings,
) -> RunResult:
    finished = _finished(fold)
    return RunResult(
        sandbox_id=sandbox_id,
        lost_before=lost_before,
        status=finished.status,
        timed_out_after_s=timed_out_after_s,
        state=finished.state,
        exit_code=finished.exit_code,
        signal=finished.signal,
        error=finished.error,
        stdout=stdout,
        stderr=stderr,
        displays=tuple(fold.displays),
        displays_dropped=fold.displays_dropped + finished.output.displays_dropped,
        artifacts=tuple(fold.artifacts.values()),
        pictures=pictures,
        timings=timings,
    )
