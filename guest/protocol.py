"""The wire between host and agent: encoding and decoding frames, with hard limits and without I/O.

A frame is `MCSB`, the lengths of its header and its body (32 bits each, big endian), the header (a JSON object) and
the body (raw bytes). Requests carry `{"id", "op", …}`. The answer to each is any number of `{"id", "event", …}` frames
and then exactly one `{"id", "ok": true, …}` or `{"id", "ok": false, "error": {"code", "message"}}`.

Both sides use this module. In the machine it runs in the image's Python, so it imports the standard library only.
"""

import json
import struct
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from json.scanner import c_make_scanner  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from guest.errors import ProtocolError

PROTOCOL_VERSION = 2
MAGIC = b"MCSB"
PREFIX = struct.Struct(">4sII")
MAX_HEADER = 64 * 1024  # bytes; whatever can be large travels in the body
MAX_BODY = 1024 * 1024  # bytes; a larger frame would hold up the others
MAX_DISPLAYS = 10_000  # of one run; those without text count against no other limit
MAX_ARTIFACTS = 1000  # of one run
MAX_COMMANDS = 32  # active at the same time in one machine; each takes memory for its output
MAX_LISTING = 64 * 1024  # bytes of one page of a directory: what the host has to parse at once
MAX_SKIP = 4 * 1024 * 1024  # bytes of garbage skipped before the first frame
MAX_FALSE_STARTS = 16  # in that garbage: each may cost the parsing of a header


class Frame(NamedTuple):
    """One message."""

    header: dict[str, Any]
    body: bytes


# The C functions of the json module, called directly. The module's Python layer builds an encoder for every call and
# skips white space with regular expressions, which costs an emulated CPU more than the parsing.
def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not JSON")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_encode_parts = c_make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, False)
_scan = c_make_scanner(json.JSONDecoder(parse_constant=_refuse_constant))


def encode_json(value: Any) -> bytes:  # noqa: ANN401 - anything JSON can carry
    """Return a value as compact ASCII JSON."""
    return "".join(_encode_parts(value, 0)).encode("ascii")


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of one frame. Raises ProtocolError if it would exceed the limits."""
    raw = encode_json(header)
    if len(raw) > MAX_HEADER or len(body) > MAX_BODY:
        raise ProtocolError(f"a frame of {len(raw)} + {len(body)} bytes exceeds the limit")
    return b"".join((PREFIX.pack(MAGIC, len(raw), len(body)), raw, body))


def decode_json(raw: bytes) -> Any:  # noqa: ANN401 - JSON is what it is; callers check
    """Parse JSON from an untrusted peer. Raises ProtocolError for anything but compact, strict UTF-8 JSON."""
    try:
        text = raw.decode("utf-8")
        value, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration) as error:
        raise ProtocolError(f"not valid JSON: {error}") from error
    if end != len(text):
        raise ProtocolError("not valid JSON: something follows it")
    return value


def split_code(body: bytes, code_bytes: int | None) -> tuple[str, dict[str, Any]]:
    """Return the code and the options in the body of a run request.

    The options follow the code as JSON if the request says how many bytes the code has. Raises ProtocolError.
    """
    if code_bytes is None:
        return body.decode("utf-8", "replace"), {}
    options = decode_json(body[code_bytes:])
    if type(options) is not dict:
        raise ProtocolError("the options of a run are not an object")
    return body[:code_bytes].decode("utf-8", "replace"), options


class Decoder:
    """Splits a stream of bytes, which may arrive in any pieces, into frames.

    With `seeking` it skips garbage until the first valid frame: a virtio serial port knows no connections, so the first
    bytes may be the end of an earlier conversation.
    """

    def __init__(self, *, seeking: bool = False) -> None:
        self._held = bytearray()  # the start of an incomplete frame
        self._seeking = seeking
        self._skipped = self._false_starts = 0

    def feed(self, data: bytes, most: int = -1) -> list[Frame]:
        """Add received bytes and return the frames that are complete now, or only the first `most` of them.

        The others wait for the next call, which may add no bytes. Raises ProtocolError on a violation.
        """
        buffer: bytes | bytearray = data
        if self._held:
            self._held += data
            buffer = self._held
        frames: list[Frame] = []
        start = 0
        while start < len(buffer) and len(frames) != most:
            try:
                frame, end = _cut(buffer, start)
            except ProtocolError:
                if not self._seeking:
                    raise
                start = self._skip(buffer, start)
                continue
            if frame is None:
                break
            frames.append(frame)
            self._seeking = False
            start = end
        if buffer is self._held:
            del self._held[:start]
        else:
            self._held += buffer[start:]
        return frames

    @property
    def incomplete(self) -> bytes:
        """What was received and not returned as a frame yet."""
        return bytes(self._held)

    def resync(self) -> None:
        """Discard an incomplete frame and look for the next valid one."""
        self._held.clear()
        self._seeking = True
        self._skipped = self._false_starts = 0

    def _skip(self, buffer: bytes | bytearray, start: int) -> int:
        """Return where the next frame might begin."""
        found = buffer.find(MAGIC, start + 1)
        if found < 0:  # the last bytes may be a magic cut in two
            found = max(start + 1, len(buffer) - len(MAGIC) + 1)
        else:
            self._false_starts += 1
        self._skipped += found - start
        if self._skipped > MAX_SKIP or self._false_starts > MAX_FALSE_STARTS:
            self._seeking = False
            raise ProtocolError(f"no frame in {self._skipped} bytes")
        return found


def _cut(buffer: bytes | bytearray, start: int) -> tuple[Frame | None, int]:
    """Return the frame that begins at `start` and where it ends, or None if it is incomplete."""
    available = len(buffer) - start
    if available < PREFIX.size:
        if buffer[start : start + 4] != MAGIC[:available]:
            raise ProtocolError("not a frame: the magic is missing")
        return None, start
    magic, header_size, body_size = PREFIX.unpack_from(buffer, start)
    if magic != MAGIC:
        raise ProtocolError("not a frame: the magic is missing")
    if header_size > MAX_HEADER or body_size > MAX_BODY:
        raise ProtocolError(f"a frame of {header_size} + {body_size} bytes exceeds the limit")
    middle = start + PREFIX.size + header_size
    end = middle + body_size
    if len(buffer) < end:
        return None, start
    header = decode_json(bytes(buffer[start + PREFIX.size : middle]))
    if type(header) is not dict:
        raise ProtocolError("a frame's header is not an object")
    return Frame(header, bytes(buffer[middle:end])), end
