"""Results as content blocks: what a model reads, in the order it needs it."""

import base64
import json
from collections.abc import Sequence
from itertools import accumulate

from mcp_types import ContentBlock, ImageContent, ResourceLink, TextContent

from guest.client.messages import Display
from guest.client.reports import CompiledReport, HandlerReport
from mcp_sandbox.runs.results import readable
from mcp_sandbox.sandboxes.file_access import mime_of
from mcp_sandbox.tools.compiled_results import compiled_parts, compiled_words
from mcp_sandbox.tools.handler_results import measured_part, result_part
from mcp_sandbox.tools.next_steps import NEXT_STEPS
from mcp_sandbox.views import ImageView, RunProgress, RunView, StreamView, file_uri, with_next_step

MAX_VALUE_CHARS = 8000  # of one shown value or traceback; whatever is longer is better read from a file
MAX_VALUES_CHARS = 10_000  # of all shown values of a run, about 2,500 tokens
MAX_LOSS_CHARS = 600  # of how a service ended
MAX_NAMED_ARTIFACTS = 50
MAX_ARTIFACTS_CHARS = 6000  # of the lines that name them: a path can have 4,095 bytes


def text_block(text: str) -> TextContent:
    """Text for the model."""
    return TextContent(type="text", text=text)


def image_block(image: ImageView) -> ImageContent:
    """An image for the model."""
    return ImageContent(type="image", data=base64.b64encode(image.data).decode(), mime_type=image.mime_type)


def call_of(tool: str, sandbox_id: str, path: str) -> str:
    """The beginning of a call a model can copy, whatever characters the path has."""
    return f"{tool}(sandbox_id={quoted(sandbox_id)}, path={quoted(path)}"


def quoted(text: str) -> str:
    """A name from a sandbox as a string of JSON: it can neither break a line nor pass for more than a name."""
    return json.dumps(text, ensure_ascii=False)


def link_block(sandbox_id: str, path: str, size: int) -> ResourceLink:
    """The address of a file that is neither text nor a picture."""
    return ResourceLink(
        type="resource_link",
        name=path.rpartition("/")[2],
        uri=file_uri(sandbox_id, path),
        mime_type=mime_of(path),
        size=size,
    )


def run_blocks(result: RunView) -> list[ContentBlock]:
    """The result of a run: one readable text, then the pictures."""
    streams = [_stream("stdout", result.stdout, result), _stream("stderr", result.stderr, result)]
    return _blocks(result, *streams)


def progress_blocks(view: RunProgress) -> list[ContentBlock]:
    """A piece of a run's output and where the run stands; with the last piece, what else came of it."""
    output = view.page.text.rstrip()
    if view.result is None or view.page.end < view.page.size:
        return [text_block("\n\n".join(part for part in (output, _standing(view)) if part))]
    spills = [
        f"{name}: {_rest(captured, view.result)}"
        for name, captured in (("stdout", view.result.stdout), ("stderr", view.result.stderr))
        if captured.spill is not None
    ]
    return _blocks(view.result, output, *spills)


def _blocks(result: RunView, *output: str) -> list[ContentBlock]:
    before, after = _handler(result)
    parts = [before, *output, *_report(result), *_values(result), _error(result), _artifacts(result), _service(result)]
    text = "\n\n".join(part for part in (*parts, after, _status(result)) if part)
    return [text_block(text), *map(image_block, result.images)]


def _standing(view: RunProgress) -> str:
    page = view.page
    if view.error is not None:
        words = [f"{view.run_id} was lost after {view.elapsed_s:.0f} s: {with_next_step(view.error, NEXT_STEPS)}"]
    elif view.result is None:
        words = [f"{view.run_id} is still running, {view.elapsed_s:.0f} s so far, stopped in {view.left_s:.0f} s"]
    else:
        words = [f"{view.run_id} is over: {_outcome(view.result)}"]
    words.append(f"sandbox {view.sandbox_id}")
    words.append(f"output bytes {page.start:,} to {page.end:,} of {page.size:,}")
    if view.live_full:
        words.append("it writes more than is sent while it runs: the end comes with its result")
    if view.error is None or page.end < page.size:
        words.append(f"to read on: {_read_output(view.sandbox_id, view.run_id, page.end)}")
    if view.result is None and view.error is None:
        words.append(f"to end it: stop_run(sandbox_id={quoted(view.sandbox_id)}, run_id={quoted(view.run_id)})")
    return f"[{' · '.join(words)}]"


def _read_output(sandbox_id: str, run_id: str, offset: int) -> str:
    return f"read_output(sandbox_id={quoted(sandbox_id)}, run_id={quoted(run_id)}, offset={offset})"


def _stream(name: str, captured: StreamView, result: RunView) -> str:
    if not captured:
        return ""
    if not captured.omitted_bytes:
        return f"{name}:\n{captured.head.rstrip()}"
    how = _rest(captured, result)
    return f"{name}:\n{captured.head}\n[… {captured.omitted_bytes:,} bytes left out; {how} …]\n{captured.tail.rstrip()}"


def _rest(captured: StreamView, result: RunView) -> str:
    """How to read what is left out of a stream."""
    if result.sandbox_id is None:
        return "lost with the one-off sandbox; run in a sandbox from create_sandbox to keep the whole output"
    if captured.spill is None:
        if captured.log_offset is None:
            return "not kept"
        return f"to read on: {_read_output(result.sandbox_id, result.run_id, captured.log_offset)}"
    # What was not UTF-8 became U+FFFD, three bytes for at least one: reading on may repeat, but never skips.
    offset = len(captured.head.encode()) - 2 * captured.head.count("\ufffd")
    cut = "" if captured.spill_bytes is None else f"only the first {captured.spill_bytes:,} bytes were kept; "
    return f"{cut}to read on: {call_of('read_file', result.sandbox_id, captured.spill)}, offset={offset})"


def _handler(result: RunView) -> tuple[str, str]:
    """What a handler gave back, to be read first, and what its call took."""
    report = result.report
    if not isinstance(report, HandlerReport):
        return "", ""
    if result.sandbox_id is None or report.result_file is None:
        how = "lost with the one-off sandbox; call the handler in a sandbox from create_sandbox to keep it"
    else:
        how = f"to read it: {call_of('read_artifact', result.sandbox_id, report.result_file)})"
    return result_part(report, how), measured_part(report)


def _report(result: RunView) -> list[str]:
    return compiled_parts(result.report) if isinstance(result.report, CompiledReport) else []


def _values(result: RunView) -> list[str]:
    values = [text for text in map(_value, result.displays) if text]
    shown = _fitting(values, MAX_VALUES_CHARS)
    left_out = len(values) - len(shown) + result.displays_dropped
    if left_out:
        shown.append(f"({left_out} more shown values left out; show fewer at once, or write them to a file)")
    return shown


def _fitting(texts: Sequence[str], room: int) -> list[str]:
    """The first of `texts` that together are no longer than `room`."""
    lengths = accumulate(map(len, texts))
    return [text for text, length in zip(texts, lengths, strict=True) if length <= room]


def _value(display: Display) -> str:
    best = readable(display)
    if not best:
        return f"(a value shown as {', '.join(sorted(display.data))})" if display.data else ""
    return f"result:\n{_shortened(best)}"


def _error(result: RunView) -> str:
    if result.error is None:
        return ""
    trace = result.error.traceback.strip() or f"{result.error.name}: {result.error.message}"
    return f"error:\n{_shortened(trace)}"


def _artifacts(result: RunView) -> str:
    if not result.artifacts:
        return ""
    shown = {image.path for image in result.images}
    lines = [
        f"- {quoted(artifact.path)} ({artifact.mime_type}, {artifact.size:,} bytes"
        f"{', shown below' * (artifact.path in shown)})"
        for artifact in result.artifacts[:MAX_NAMED_ARTIFACTS]
    ]
    lines = _fitting(lines, MAX_ARTIFACTS_CHARS)
    if len(result.artifacts) > len(lines):
        lines.append(f"- … and at least {len(result.artifacts) - len(lines)} more (list_artifacts names more)")
    if result.sandbox_id is None:
        how = "These files ended with the one-off sandbox; run in a sandbox from create_sandbox to keep files."
    else:
        how = f"To read one: read_artifact(sandbox_id={quoted(result.sandbox_id)}, path=…)"
    return "\n".join(["artifacts:", *lines, how])


def _service(result: RunView) -> str:
    if result.service_loss is None:
        return ""
    how = result.service_loss[:MAX_LOSS_CHARS]
    return f"service:\nThe template's service has ended ({how}). For one that runs, call create_sandbox."


def _status(result: RunView) -> str:
    timings = result.timings
    words = [_outcome(result)]
    if isinstance(result.report, CompiledReport):
        words += compiled_words(result.report)
    if _has_variables(result):
        words += _losses(result)
    words.append(f"sandbox {result.sandbox_id}" if result.sandbox_id else "one-off sandbox, now destroyed")
    if result.expires_in_s is not None:
        words.append(f"ends after {result.expires_in_s:.0f} s without use")
    words.append(
        f"queue {timings.queue_ms:.0f} ms, restore {timings.restore_ms:.0f} ms, "
        f"run {timings.run_ms:.0f} ms, total {timings.total_ms:.0f} ms"
    )
    return f"[{' · '.join(words)}]"


def _losses(result: RunView) -> list[str]:
    if result.state == "lost" and result.sandbox_id is not None:
        return ["the process was restarted: variables and imports are lost, files are kept"]
    if result.lost_before:
        return ["before this run, an earlier one had to be killed: variables and imports from before are lost"]
    return []


def _outcome(result: RunView) -> str:
    kept = "; variables are kept" if _keeps_variables(result) else ""
    if result.timed_out_after_s is not None:
        return f"stopped: time limit of {result.timed_out_after_s:g} s reached{kept}"
    if result.stopped:
        killed = _has_variables(result) and result.state == "lost"
        return "killed on request" if killed else f"stopped on request{kept}"
    match result.status:
        case "exited":
            return f"exited with code {result.exit_code}"
        case "killed":
            return f"killed by {result.signal}" if result.signal else "killed"
        case status:
            return status


def _has_variables(result: RunView) -> bool:
    """Whether more than files lasts from run to run."""
    return result.language == "python"


def _keeps_variables(result: RunView) -> bool:
    """Whether that has to be said of a run that was stopped. Of a command it would be taken for the shell's."""
    kept = result.state == "kept" and result.sandbox_id is not None
    return kept and result.kind != "command" and _has_variables(result)


def _shortened(text: str) -> str:
    if len(text) <= MAX_VALUE_CHARS:
        return text.rstrip()
    half = MAX_VALUE_CHARS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:].rstrip()}"
