"""Converts between values and what the wire carries. Everything parsed here may come from a hostile machine."""

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from guest.client.messages import (
    MAX_MESSAGE,
    Artifact,
    Chart,
    Display,
    FileChunk,
    FileInfo,
    Finished,
    Hello,
    Listing,
    Refreshed,
    RunCode,
    WarmUp,
)
from guest.client.wire import Flag, Path, Text, Whole, check, line, one_line
from guest.errors import ProtocolError, RequestRefused
from guest.forms import CHART, PLAIN, TEXTS
from guest.protocol import MAX_LISTING, PROTOCOL_VERSION, Frame, decode_json

MAX_CODE = 40  # characters of a refusal
MAX_FILES = 64  # of one display
MAX_FORMS = 32  # of one display
MAX_FORM_NAME = 100  # characters
MAX_CHART = 256 * 1024  # characters; more than the longest labels take
KNOWN_FORMS = frozenset({PLAIN, *TEXTS})
MAX_TRACEBACK = 64 * 1024  # characters; kernels send less


@dataclass(frozen=True, slots=True)
class _Refusal:
    code: Annotated[Text, line(MAX_CODE)]
    message: Text


@dataclass(frozen=True, slots=True)
class _Refreshed:
    time_ns: Whole
    entropy_credited: Flag
    hostname_set: Flag


_REFUSAL = TypeAdapter(_Refusal)
_REFRESHED = TypeAdapter(_Refreshed)
_HELLO = TypeAdapter(Hello)
_FILE_INFO = TypeAdapter(FileInfo)
_FILE_CHUNK = TypeAdapter(FileChunk)
_LISTING = TypeAdapter(Listing)
_ARTIFACT = TypeAdapter(Artifact)
_FINISHED = TypeAdapter(Finished)
_CHART = TypeAdapter(Chart)
_FORMS = TypeAdapter(Annotated[dict[Annotated[Text, line(MAX_FORM_NAME)], Text], Field(max_length=MAX_FORMS)])
_FILES = TypeAdapter(Annotated[tuple[Path, ...], Field(max_length=MAX_FILES)])


def is_ok(frame: Frame) -> bool:
    """Return whether a frame that ends a request says yes or no. Raises ProtocolError if it says neither."""
    ok = frame.header.get("ok")
    if type(ok) is not bool:
        raise ProtocolError("the agent sent something that is not an answer")
    return ok


def parse_refusal(header: dict[str, Any]) -> RequestRefused:
    """Return the error that a refused request carries."""
    refusal = check(_REFUSAL, header.get("error"), "refusal")
    lines = refusal.message[:MAX_MESSAGE].splitlines()  # some refusals quote what a program wrote
    return RequestRefused(refusal.code, "\n".join(one_line(text, MAX_MESSAGE) for text in lines))


def parse_file_info(fields: object) -> FileInfo:
    """Parse one file system entry."""
    return check(_FILE_INFO, fields, "file entry")


def parse_display(header: dict[str, Any], body: bytes) -> Display:
    """Parse a displayed value.

    The agent passes its forms on as the code wrote them, unread. Forms that make no sense or have other types than we
    know are dropped: they are not the agent's fault.
    """
    try:
        data = check(_FORMS, decode_json(body), "display")
    except ProtocolError:
        data = {}
    known = {mime: form for mime, form in data.items() if mime in KNOWN_FORMS}
    return Display(known, check(_FILES, header.get("files", []), "display"), _parse_chart(data.get(CHART)))


def _parse_chart(facts: str | None) -> Chart | None:
    """Parse what a chart shows, as the code wrote it."""
    if facts is None or len(facts) > MAX_CHART:
        return None
    try:
        return check(_CHART, decode_json(facts.encode()), "chart")
    except ProtocolError:
        return None


def parse_artifact(header: dict[str, Any]) -> Artifact:
    """Parse the notice of a file that a run left."""
    return check(_ARTIFACT, header, "artifact")


def parse_finished(header: dict[str, Any], body: bytes) -> Finished:
    """Parse the end of a run; the body is the traceback of its error."""
    finished = check(_FINISHED, {"exit_code": None, "signal": None, "error": None, **header}, "result")
    if finished.error is None:
        return finished
    trace = body[: 4 * MAX_TRACEBACK].decode("utf-8", "replace")[:MAX_TRACEBACK]
    return replace(finished, error=replace(finished.error, traceback=trace))


def parse_hello(header: dict[str, Any], nonce: str) -> Hello:
    """Parse the answer to hello."""
    require_version(header.get("version"))
    if header.get("nonce") != nonce:
        raise ProtocolError("the agent's greeting is not the answer to ours")
    return check(_HELLO, header, "greeting")


def require_version(version: object) -> None:
    """Raise ProtocolError if an agent speaks another version of the protocol than this host."""
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the machine's agent speaks protocol {str(version)[:20]}, this host {PROTOCOL_VERSION}; "
            "rebuild its template"
        )


def parse_refreshed(header: dict[str, Any], now_ns: int) -> Refreshed:
    """Parse the outcome of a refresh; `now_ns` is the host's time at which the agent read its clock."""
    done = check(_REFRESHED, header, "refresh")
    return Refreshed((done.time_ns - now_ns) / 1e9, done.entropy_credited, done.hostname_set)


def parse_chunk(frame: Frame, limit: int) -> FileChunk:
    """Parse a part of a file."""
    if len(frame.body) > limit:
        raise ProtocolError("the agent sent more of a file than was asked for")
    chunk = check(_FILE_CHUNK, {**frame.header, "data": frame.body}, "part of a file")
    if len(chunk.data) < limit and not chunk.eof:  # the host would ask again and again, without an end
        raise ProtocolError("the agent sent less of a file than was asked for, and not its end")
    return chunk


def parse_written(frame: Frame, *, last: bool) -> FileInfo | None:
    """Parse the answer to one part of a write. The file exists once its last part has arrived, and not before."""
    if last:
        return parse_file_info(frame.header.get("file"))
    if frame.header.get("file") is not None:
        raise ProtocolError("the agent says that a file is written of which it has only a part")
    return None


def parse_listing(frame: Frame, limit: int) -> Listing:
    """Parse the entries of a directory."""
    if len(frame.body) > MAX_LISTING:
        raise ProtocolError("the agent's listing is too long")
    entries = decode_json(frame.body)
    if type(entries) is not list or len(entries) > limit:
        raise ProtocolError("the agent's listing is not a list, or longer than was asked for")
    return check(_LISTING, {**frame.header, "entries": entries}, "listing")


def warm_args(request: WarmUp) -> dict[str, Any]:
    """Return a warm-up as the wire carries it; its code is the body."""
    service = request.service and {**asdict(request.service), "env": dict(request.service.env)}
    return {
        "language": request.language,
        "env": dict(request.env),
        "service": service,
        "user_namespaces": request.user_namespaces,
        "rehearsal": request.rehearsal,
    }


def run_args(request: RunCode) -> dict[str, Any]:
    """Return the limits of a run as the wire carries them."""
    return {
        **({"keep_processes": True} if request.keep_processes else {}),
        **({"stdin_open": True} if request.stdin_open else {}),
        "grace_ms": round(request.grace_s * 1000),
        "head_bytes": request.head_bytes,
        "tail_bytes": request.tail_bytes,
        "max_display_bytes": request.max_display_bytes,
    }
