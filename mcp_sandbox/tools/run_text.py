"""A run as a model reads it: one text, most important first, then the images."""

from mcp_types import ContentBlock

from guest.client.messages import Display
from guest.client.reports import CompiledReport, HandlerReport
from guest.languages import language
from mcp_sandbox.tools.content import call, fitting, image_block, quoted, text_block
from mcp_sandbox.tools.next_steps import NEXT_STEPS
from mcp_sandbox.views import RunProgress, RunView, StreamView, with_next_step
from mcp_sandbox.views.text import (
    collapsed,
    compiled_parts,
    compiled_summary,
    handler_usage,
    missing_module,
    readable,
)

MAX_VALUE_CHARS = 8000  # of one displayed value or traceback; longer ones are better read from a file
MAX_VALUES_CHARS = 10_000  # of all displayed values, about 2,500 tokens
MAX_RESULT_CHARS = 16 * 1024  # of a handler's result; an honest guest sends no more
MAX_NAMED_ARTIFACTS = 50
MAX_NAMED_FILES = 2  # of one displayed value; an honest one seldom has more
MAX_ARTIFACTS_CHARS = 6000  # of the lines that name artifacts: a path can have 4,095 bytes
KEEP_WITH_SANDBOX = "lost with the one-off sandbox; use a sandbox from create_sandbox to keep it"


def run_blocks(run: RunView) -> list[ContentBlock]:
    """Return the result of a run."""
    return _blocks(run, _stream("stdout", run.stdout, run), _stream("stderr", run.stderr, run))


def progress_blocks(progress: RunProgress) -> list[ContentBlock]:
    """Return a page of output and where the run stands; the last page is followed by the run's result."""
    output = collapsed(progress.page.text).rstrip()
    run = progress.result
    if run is None or progress.page.end < progress.page.size:
        return [text_block("\n\n".join(part for part in (output, _standing(progress)) if part))]
    streams = (("stdout", run.stdout), ("stderr", run.stderr))
    spills = [f"{name}: {_how_to_read_on(stream, run)}" for name, stream in streams if stream.spill is not None]
    return _blocks(run, output, *spills)


def _blocks(run: RunView, *output: str) -> list[ContentBlock]:
    report = run.report
    parts = [
        _handler_result(run, report) if isinstance(report, HandlerReport) else "",
        *output,
        *(compiled_parts(report) if isinstance(report, CompiledReport) else ()),
        *_values(run),
        _error(run),
        missing_module(run.missing_module, 'template="{}"') if run.missing_module else "",
        _artifacts(run),
        _service(run),
        _network(run),
        handler_usage(report) if isinstance(report, HandlerReport) else "",
        _status(run),
    ]
    return [text_block("\n\n".join(part for part in parts if part)), *map(image_block, run.images)]


def _standing(progress: RunProgress) -> str:
    page, run_id, sandbox_id = progress.page, progress.run_id, progress.sandbox_id
    seconds = f"{progress.elapsed_s:.0f} s"
    if progress.error is not None:
        phrases = [f"{run_id} was lost after {seconds}: {with_next_step(progress.error, NEXT_STEPS)}"]
    elif progress.result is None:
        phrases = [f"{run_id} is still running after {seconds}, time limit in {progress.left_s:.0f} s"]
    else:
        phrases = [f"{run_id} is over: {_outcome(progress.result)}"]
    phrases.append(f"sandbox {sandbox_id}")
    phrases.append(f"output bytes {page.start:,} to {page.end:,} of {page.size:,}")
    if progress.live_full:
        phrases.append("it writes more than is sent live: the end of the output comes with the result")
    if progress.error is None or page.end < page.size:
        phrases.append(f"to read on: {call('read_output', sandbox_id=sandbox_id, run_id=run_id, offset=page.end)}")
    if progress.result is None and progress.error is None:
        phrases.append(f"to stop it: {call('stop_run', sandbox_id=sandbox_id, run_id=run_id)}")
    return f"[{' · '.join(phrases)}]"


def _stream(name: str, stream: StreamView, run: RunView) -> str:
    if not stream:
        return ""
    if not stream.omitted_bytes:
        return f"{name}:\n{collapsed(stream.head).rstrip()}"
    gap = f"[… {stream.omitted_bytes:,} bytes omitted; {_how_to_read_on(stream, run)} …]"
    return f"{name}:\n{collapsed(stream.head)}\n{gap}\n{collapsed(stream.tail).rstrip()}"


def _how_to_read_on(stream: StreamView, run: RunView) -> str:
    if run.sandbox_id is None:
        return KEEP_WITH_SANDBOX
    if stream.spill is None:
        if stream.log_offset is None:
            return "not kept"
        read = call("read_output", sandbox_id=run.sandbox_id, run_id=run.run_id, offset=stream.log_offset)
        return f"to read on: {read}"
    # Bytes that are not UTF-8 became U+FFFD, three bytes for at least one: reading on may repeat, but never skips.
    offset = len(stream.head.encode()) - 2 * stream.head.count("\ufffd")
    cut = "" if stream.spill_bytes is None else f"only the first {stream.spill_bytes:,} bytes were kept; "
    return f"{cut}to read on: {call('read_file', sandbox_id=run.sandbox_id, path=stream.spill, offset=offset)}"


def _handler_result(run: RunView, report: HandlerReport) -> str:
    if report.result is None:
        return ""
    result = report.result[:MAX_RESULT_CHARS]
    if report.result_file is None and len(report.result.encode()) >= report.result_bytes:
        return f"result:\n{result}"
    if report.result_file is None:
        rest = "not kept: there was no room to write it to a file"
    elif run.sandbox_id is None:
        rest = KEEP_WITH_SANDBOX
    else:
        rest = f"to read it: {call('read_artifact', sandbox_id=run.sandbox_id, path=report.result_file)}"
    return f"result:\n{result}\n[… cut; the whole JSON has {report.result_bytes:,} bytes: {rest} …]"


def _values(run: RunView) -> list[str]:
    values = [text for text in map(_value, run.displays) if text]
    shown = fitting(values, MAX_VALUES_CHARS)
    omitted = len(values) - len(shown) + run.displays_dropped
    if omitted:
        shown.append(f"({omitted} more values omitted; display fewer at once, or write them to a file)")
    return shown


def _value(display: Display) -> str:
    if not display.data:
        return ""  # its files are among the artifacts
    text = readable(display) or f"(a value displayed as {', '.join(sorted(display.data))})"
    kind = "result" if display.chart is None else "chart"
    place = f" in {', '.join(map(quoted, display.files[:MAX_NAMED_FILES]))}" if display.files else ""
    return f"{kind}{place}:\n{_shortened(text)}"


def _error(run: RunView) -> str:
    if run.error is None:
        return ""
    trace = run.error.traceback.strip() or f"{run.error.name}: {run.error.message}"
    return f"error:\n{_shortened(trace)}"


def _artifacts(run: RunView) -> str:
    if not run.artifacts and run.artifacts_complete:
        return ""
    shown = {image.path for image in run.images}
    lines = [
        f"- {quoted(artifact.path)} ({artifact.mime_type}, {artifact.size:,} bytes"
        f"{', shown below' * (artifact.path in shown)})"
        for artifact in run.artifacts[:MAX_NAMED_ARTIFACTS]
    ]
    lines = fitting(lines, MAX_ARTIFACTS_CHARS)
    if len(run.artifacts) > len(lines):
        lines.append(f"- … and at least {len(run.artifacts) - len(lines)} more (list_artifacts names more)")
    elif not run.artifacts_complete:
        lines.append("- … there are too many files to look at all of them (list_artifacts names more)")
    if run.sandbox_id is None:
        lines.append("These files ended with the one-off sandbox; use a sandbox from create_sandbox to keep files.")
    else:
        lines.append(f"To read one: read_artifact(sandbox_id={quoted(run.sandbox_id)}, path=…)")
    return "\n".join(["artifacts:", *lines])


def _service(run: RunView) -> str:
    if run.service_loss is None:
        return ""
    return f"service:\nThe template's service has ended ({run.service_loss}). Call create_sandbox to get one that runs."


def _network(run: RunView) -> str:
    if not run.network_refusals:
        return ""
    return "\n".join(["network (refused by policy):", *(f"- {refusal}" for refusal in run.network_refusals)])


def _status(run: RunView) -> str:
    timings = run.timings
    phrases = [_outcome(run)]
    if isinstance(run.report, CompiledReport):
        phrases += compiled_summary(run.report)
    if _has_variables(run):
        phrases += _lost_variables(run)
    phrases.append(f"sandbox {run.sandbox_id}" if run.sandbox_id else "one-off sandbox, now destroyed")
    if run.expires_in_s is not None:
        phrases.append(f"ends after {run.expires_in_s:.0f} s without use")
    phrases.append(
        f"queue {timings.queue_ms:.0f} ms, restore {timings.restore_ms:.0f} ms, "
        f"run {timings.run_ms:.0f} ms, total {timings.total_ms:.0f} ms"
    )
    return f"[{' · '.join(phrases)}]"


def _lost_variables(run: RunView) -> list[str]:
    if run.state == "lost" and run.sandbox_id is not None:
        return ["the process was restarted: variables and imports are lost, files are kept"]
    if run.lost_before:
        return ["an earlier run was killed before this one: its variables and imports are lost"]
    return []


def _outcome(run: RunView) -> str:
    kept = "; variables are kept" if _keeps_variables(run) else ""
    if run.timed_out_after_s is not None:
        return f"stopped: time limit of {run.timed_out_after_s:g} s reached{kept}"
    if run.stopped:
        killed = _has_variables(run) and run.state == "lost"
        return "killed on request" if killed else f"stopped on request{kept}"
    match run.status:
        case "exited":
            return f"exited with code {run.exit_code}"
        case "killed":
            return f"killed by {run.signal}" if run.signal else "killed"
        case status:
            return status


def _has_variables(run: RunView) -> bool:
    """Whether variables, not only files, persist between runs."""
    return language(run.language).stateful


def _keeps_variables(run: RunView) -> bool:
    """Whether to say that a stopped run kept its variables. After a command it would be read as the shell's."""
    kept = run.state == "kept" and run.sandbox_id is not None
    return kept and run.kind != "command" and _has_variables(run)


def _shortened(text: str) -> str:
    if len(text) <= MAX_VALUE_CHARS:
        return text.rstrip()
    half = MAX_VALUE_CHARS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters omitted …]\n{text[-half:].rstrip()}"
