"""Turns an agent's headers into values, field by field.

Everything parsed here comes from a machine that may be hostile: a missing or wrongly typed field is a
ProtocolError, never a KeyError.
"""

import mimetypes
from dataclasses import asdict
from typing import Any

from guest.client.fields import choice, flag, number, table, text, text_or_none, whole
from guest.client.messages import (
    Artifact,
    CodeError,
    Display,
    FileChunk,
    FileInfo,
    Finished,
    GuestUsage,
    Hello,
    Kind,
    Listing,
    OutputTotals,
    Refreshed,
    RunCode,
    State,
    Status,
    WarmUp,
)
from guest.errors import ProtocolError, RequestRefused
from guest.protocol import PROTOCOL_VERSION, Frame, decode_json


def parse_refusal(header: dict[str, Any]) -> RequestRefused:
    """The error a refused request carries."""
    error = table(header.get("error"), "error")
    return RequestRefused(text(error, "code")[:40], text(error, "message")[:4000])


def parse_file_info(fields: Any) -> FileInfo:  # noqa: ANN401 - checked here
    """One file system entry."""
    fields = table(fields, "file entry")
    return FileInfo(
        path=text(fields, "path"),
        kind=choice(fields, "kind", Kind),
        size=whole(fields, "size"),
        mtime=number(fields, "mtime"),
    )


def parse_display(header: dict[str, Any], body: bytes) -> Display:
    """A displayed value.

    Its forms are the code's own words, passed on unread: nonsense in them is no fault of the agent's, and shows
    nothing.
    """
    try:
        forms = decode_json(body)
        data = {mime: text(forms, mime) for mime in table(forms, "display data")}
    except ProtocolError:
        data = {}
    files = header.get("files", [])
    if type(files) is not list or len(files) > 64:
        raise ProtocolError("the agent's 'files' is not a short list")
    named = {str(index): name for index, name in enumerate(files)}
    return Display(data, tuple(text(named, key) for key in named))


def parse_artifact(header: dict[str, Any]) -> Artifact:
    """A file a run left."""
    path = text(header, "path")
    return Artifact(path, whole(header, "size"), mimetypes.guess_type(path)[0] or "application/octet-stream")


def parse_finished(header: dict[str, Any], body: bytes) -> Finished:
    """The end of a run."""
    error = None
    if header.get("error") is not None:
        fields = table(header["error"], "error")
        error = CodeError(text(fields, "name"), text(fields, "message"), body.decode("utf-8", "replace"))
    exit_code = header.get("exit_code")
    if exit_code is not None and (type(exit_code) is not int or abs(exit_code) > 2**31):
        raise ProtocolError("the agent's 'exit_code' is not an exit code")
    output = table(header.get("output"), "output")
    return Finished(
        status=choice(header, "status", Status),
        state=choice(header, "state", State),
        exit_code=exit_code,
        signal=text_or_none(header, "signal"),
        error=error,
        duration_s=whole(header, "duration_ns") / 1e9,
        output=OutputTotals(
            stdout_bytes=whole(output, "stdout_bytes"),
            stderr_bytes=whole(output, "stderr_bytes"),
            stdout_spill=text_or_none(output, "stdout_spill"),
            stderr_spill=text_or_none(output, "stderr_spill"),
            spill_complete=flag(output, "spill_complete"),
            displays_dropped=whole(output, "displays_dropped"),
        ),
        artifacts_complete=flag(header, "artifacts_complete") if "artifacts_complete" in header else True,
        service_loss=text_or_none(header, "service_loss"),
    )


def parse_hello(header: dict[str, Any], nonce: str) -> Hello:
    """The answer to hello."""
    version = whole(header, "version")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the machine's agent speaks protocol {version}, this host {PROTOCOL_VERSION}; rebuild its template"
        )
    if text(header, "nonce") != nonce:
        raise ProtocolError("the agent's greeting is not the answer to ours")
    return Hello(
        protocol=version,
        agent=text(header, "agent"),
        language=text(header, "language"),
        language_version=text(header, "language_version"),
    )


def parse_refreshed(header: dict[str, Any], now_ns: int) -> Refreshed:
    """What came of a refresh; `now_ns` is the host's time at which the agent read its clock."""
    return Refreshed(
        clock_skew_s=(whole(header, "time_ns") - now_ns) / 1e9,
        clock_settable=flag(header, "clock_settable"),
        entropy_credited=flag(header, "entropy_credited"),
        hostname_set=flag(header, "hostname_set"),
    )


def parse_chunk(frame: Frame, limit: int) -> FileChunk:
    """Part of a file."""
    if len(frame.body) > limit:
        raise ProtocolError("the agent sent more of a file than was asked for")
    chunk = FileChunk(frame.body, whole(frame.header, "size"), flag(frame.header, "eof"))
    if len(chunk.data) < limit and not chunk.eof:  # asked again and again, it would keep the host busy for ever
        raise ProtocolError("the agent sent less of a file than was asked for, and not its end")
    return chunk


def parse_written(frame: Frame, *, last: bool) -> FileInfo | None:
    """The file that was written; it is there when its last part has arrived, and not before."""
    if last:
        return parse_file_info(frame.header.get("file"))
    if frame.header.get("file") is not None:
        raise ProtocolError("the agent says a file is written of which it has but a part")
    return None


def parse_listing(frame: Frame, limit: int) -> Listing:
    """A directory's entries."""
    entries = decode_json(frame.body)
    if type(entries) is not list or len(entries) > limit:
        raise ProtocolError("the agent's listing is not a list, or longer than was asked for")
    return Listing(tuple(parse_file_info(entry) for entry in entries), flag(frame.header, "truncated"))


def parse_usage(header: dict[str, Any]) -> GuestUsage:
    """The machine's memory and disk."""
    return GuestUsage(
        memory_total=whole(header, "memory_total"),
        memory_available=whole(header, "memory_available"),
        disk_total=whole(header, "disk_total"),
        disk_free=whole(header, "disk_free"),
    )


def warm_args(request: WarmUp) -> dict[str, Any]:
    """A warm-up as the wire carries it; its code is the body."""
    service = request.service and {**asdict(request.service), "env": dict(request.service.env)}
    return {"language": request.language, "env": dict(request.env), "service": service}


def run_args(request: RunCode) -> dict[str, Any]:
    """A run's limits as the wire carries them."""
    return {
        "grace_ms": round(request.grace_s * 1000),
        "head_bytes": request.head_bytes,
        "tail_bytes": request.tail_bytes,
        "max_display_bytes": request.max_display_bytes,
    }
