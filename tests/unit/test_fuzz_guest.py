"""Anything a machine may send is parsed or breaks the protocol: no other error, and nothing long or unprintable."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from guest.client import parsing
from guest.client.messages import MAX_LOSS, MAX_MESSAGE, MAX_NAME, Display
from guest.client.reports import MAX_COMMAND, MAX_NOTE, parse_report
from guest.client.wire import MAX_PATH
from guest.errors import GuestError, ProtocolError
from guest.protocol import Decoder, Frame, decode_json, encode, encode_json
from tests.unit.fuzzing import fuzzed
from tests.unit.json_values import JSON, changed
from tests.unit.scripted_agent import DONE
from tests.unit.test_guest_reports import COMPILED, HANDLER

FILE = {"path": "/workspace/a", "kind": "file", "size": 1, "mtime": 0.5}
HELLO = {"ok": True, "version": 2, "nonce": "n", "agent": "a", "language": "python", "language_version": "3"}
ERROR = {"name": "ValueError", "message": "no"}
Parser = Callable[[dict[str, Any], bytes], object]
# An honest message, its body, and what parses it.
MESSAGES: dict[str, tuple[dict[str, Any], bytes, Parser]] = {
    "hello": (HELLO, b"", lambda header, _: parsing.parse_hello(header, "n")),
    "refreshed": (
        {"time_ns": 1, "entropy_credited": True, "hostname_set": True},
        b"",
        lambda header, _: parsing.parse_refreshed(header, 0),
    ),
    "artifact": ({"path": "/tmp/outputs/a", "size": 1}, b"", lambda header, _: parsing.parse_artifact(header)),
    "display": ({"files": ["/tmp/outputs/a.png"]}, b'{"text/plain":"1"}', parsing.parse_display),
    "finished": ({**DONE, "error": ERROR, "service_loss": "exit code 1"}, b"Traceback", parsing.parse_finished),
    "refusal": (
        {"error": {"code": "denied", "message": "no"}},
        b"",
        lambda header, _: parsing.parse_refusal(header),
    ),
    "chunk": ({"size": 1, "eof": True}, b"x", lambda header, body: parsing.parse_chunk(Frame(header, body), 10)),
    "written": ({"file": FILE}, b"", lambda header, body: parsing.parse_written(Frame(header, body), last=True)),
    "listing": (
        {"truncated": False},
        encode_json([FILE]),
        lambda header, body: parsing.parse_listing(Frame(header, body), 3),
    ),
    "report": ({}, encode_json({**COMPILED}), lambda _, body: parse_report(body)),
    "handler's report": ({}, encode_json({**HANDLER}), lambda _, body: parse_report(body)),
}
LINES = {"agent": MAX_NAME, "name": MAX_NAME, "service_loss": MAX_LOSS, "command": MAX_COMMAND, "note": MAX_NOTE}


@st.composite
def messages(draw: st.DrawFn) -> tuple[Parser, dict[str, Any], bytes]:
    header, body, parse = MESSAGES[draw(st.sampled_from(sorted(MESSAGES)))]
    bodies = st.binary(max_size=50)
    with suppress(ProtocolError):
        bodies |= changed(decode_json(body)).map(encode_json)
    other = draw(changed(header))
    return parse, other if isinstance(other, dict) else header, draw(st.just(body) | bodies)


def texts_of(value: object, name: str = "") -> list[tuple[str, str]]:
    """Return all texts in a value, each with the name of its field."""
    if is_dataclass(value) and not isinstance(value, type):
        return texts_of(asdict(value))
    if isinstance(value, dict):
        return [found for key, part in value.items() for found in texts_of(part, str(key))]
    if isinstance(value, list | tuple):
        return [found for part in value for found in texts_of(part, name)]
    return [(name, value)] if isinstance(value, str) else []


@fuzzed
@given(messages())
def test_a_message_is_parsed_or_breaks_the_protocol(message: tuple[Parser, dict[str, Any], bytes]):
    parse, header, body = message
    try:
        value = parse(header, body)
    except ProtocolError as error:
        value = error
    if isinstance(value, GuestError):
        assert len(str(value)) <= (500 if isinstance(value, ProtocolError) else 10 * MAX_MESSAGE)
        return
    for name, text in texts_of(value):
        text.encode()  # no half of a surrogate pair
        if name in LINES:
            assert text.isprintable()
            assert len(text) <= 10 * LINES[name]  # an escape has up to ten characters
        if name in ("path", "files", "stdout_spill", "stderr_spill", "result_file"):
            assert len(text) <= MAX_PATH
    if isinstance(value, Display):
        assert all(form.isprintable() for form in value.data)


@fuzzed
@given(st.data())
def test_a_damaged_stream_is_frames_or_breaks_the_protocol(data: st.DataObject):
    """Frames come one at a time, as the reader of a channel takes them, and all bytes are used or held."""
    honest = b"".join(encode(header, body) for header, body, _ in MESSAGES.values())
    damaged = bytearray(honest)
    for place in data.draw(st.lists(st.integers(0, len(honest) - 1), max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    decoder, frames = Decoder(seeking=data.draw(st.booleans())), 0
    pieces = data.draw(st.integers(1, len(honest)))
    with suppress(ProtocolError):
        for start in range(0, len(damaged), pieces):
            found = decoder.feed(bytes(damaged[start : start + pieces]), most=1)
            while found:
                frames += len(found)
                found = decoder.feed(b"", most=1)
            assert len(decoder.incomplete) <= len(honest)
    if damaged == honest:
        assert frames == len(MESSAGES)


@settings(max_examples=300)
@given(JSON)
def test_json_of_the_wire_is_that_of_the_standard_library(value: Any):
    assert decode_json(encode_json(value)) == json.loads(json.dumps(value))
