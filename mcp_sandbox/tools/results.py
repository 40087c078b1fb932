"""Results as content blocks: what a model reads, in the order it needs it."""

import base64
import json
from collections.abc import Sequence
from itertools import accumulate
from urllib.parse import quote

from mcp_types import ContentBlock, ImageContent, ResourceLink, TextContent

from guest.client.messages import Display
from mcp_sandbox.files import mime_of
from mcp_sandbox.runs import Captured, Picture, RunResult, readable

MAX_VALUE_CHARS = 8000  # of one shown value or traceback; whatever is longer is better read from a file
MAX_VALUES_CHARS = 10_000  # of all shown values of a run, about 2,500 tokens
MAX_NAMED_ARTIFACTS = 50
MAX_ARTIFACTS_CHARS = 6000  # of the lines that name them: a path can have 4,095 bytes


def text_block(text: str) -> TextContent:
    """Text for the model."""
    return TextContent(type="text", text=text)


def image_block(picture: Picture) -> ImageContent:
    """A picture for the model."""
    return ImageContent(type="image", data=base64.b64encode(picture.data).decode(), mime_type=picture.mime)


def uri_of(sandbox_id: str, path: str) -> str:
    """The address under which `resources/read` serves a file of a sandbox."""
    return f"sandbox://{sandbox_id}/{quote(path.lstrip('/'))}"


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
        uri=uri_of(sandbox_id, path),
        mime_type=mime_of(path),
        size=size,
    )


def run_blocks(result: RunResult) -> list[ContentBlock]:
    """The result of a run: one readable text, then the pictures."""
    parts = [
        _stream("stdout", result.stdout, result.sandbox_id),
        _stream("stderr", result.stderr, result.sandbox_id),
        *_values(result),
        _error(result),
        _artifacts(result),
        _status(result),
    ]
    text = "\n\n".join(part for part in parts if part)
    return [text_block(text), *(image_block(picture) for picture in result.pictures)]


def _stream(name: str, captured: Captured, sandbox_id: str | None) -> str:
    if not captured:
        return ""
    if not captured.omitted_bytes:
        return f"{name}:\n{captured.head.rstrip()}"
    if sandbox_id is None:
        how = "lost with the one-off sandbox; run in a sandbox from create_sandbox to keep the whole output"
    elif captured.spill is None:
        how = "not kept"
    else:
        # What was not UTF-8 became U+FFFD, three bytes for at least one: reading on may repeat, but never skips.
        offset = len(captured.head.encode()) - 2 * captured.head.count("\ufffd")
        cut = "" if captured.spill_bytes is None else f"only the first {captured.spill_bytes:,} bytes were kept; "
        how = f"{cut}to read on: {call_of('read_file', sandbox_id, captured.spill)}, offset={offset})"
    return f"{name}:\n{captured.head}\n[… {captured.omitted_bytes:,} bytes left out; {how} …]\n{captured.tail.rstrip()}"


def _values(result: RunResult) -> list[str]:
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


def _error(result: RunResult) -> str:
    if result.error is None:
        return ""
    trace = result.error.traceback.strip() or f"{result.error.name}: {result.error.message}"
    return f"error:\n{_shortened(trace)}"


def _artifacts(result: RunResult) -> str:
    if not result.artifacts:
        return ""
    shown = {picture.name for picture in result.pictures}
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


def _status(result: RunResult) -> str:
    timings = result.timings
    words = [_outcome(result)]
    if result.state == "lost" and result.sandbox_id is not None:
        words.append("the process was restarted: variables and imports are lost, files are kept")
    elif result.lost_before:
        words.append("before this run, a cancelled one had to be killed: variables and imports from before are lost")
    words.append(f"sandbox {result.sandbox_id}" if result.sandbox_id else "one-off sandbox, now destroyed")
    words.append(
        f"queue {timings.queue_ms:.0f} ms, restore {timings.restore_ms:.0f} ms, "
        f"run {timings.run_ms:.0f} ms, total {timings.total_ms:.0f} ms"
    )
    return f"[{' · '.join(words)}]"


def _outcome(result: RunResult) -> str:
    if result.timed_out_after_s is not None:
        kept = "; variables are kept" if result.state == "kept" and result.sandbox_id else ""
        return f"stopped: time limit of {result.timed_out_after_s:g} s reached{kept}"
    match result.status:
        case "exited":
            return f"exited with code {result.exit_code}"
        case "killed":
            return f"killed by {result.signal}" if result.signal else "killed"
        case status:
            return status


def _shortened(text: str) -> str:
    if len(text) <= MAX_VALUE_CHARS:
        return text.rstrip()
    half = MAX_VALUE_CHARS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:].rstrip()}"
