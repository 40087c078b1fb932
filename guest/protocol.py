"""The wire between host and agent, without any I/O: frames in, frames out, hard limits.

A frame is `MCSB`, the length of its header and of its body (32 bits each, big endian), a JSON object, raw
bytes. Requests carry `{"id", "op", …}`. The answer to each is any number of `{"id", "event", …}` frames and then
exactly one `{"id", "ok": true, …}` or `{"id", "ok": false, "error": {"code", "message"}}`.

Both sides use this module; in the machine it runs on the image's Python, so it is standard library only.
"""

import json
import struct
from typing import Any, NamedTuple

from guest.errors import ProtocolError

PROTOCOL_VERSION = 1
MAGIC = b"MCSB"
PREFIX = struct.Struct(">4sII")
MAX_HEADER = 64 * 1024  # bytes; headers are small, whatever can be large travels in the body
MAX_BODY = 1024 * 1024  # bytes; keeps one frame from holding up the others for long
MAX_SKIP = 4 * 1024 * 1024  # bytes of garbage passed over while looking for the first frame

_encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


class Frame(NamedTuple):
    """One message."""

    header: dict[str, Any]
    body: bytes


def encode_json(value: Any) -> bytes:  # noqa: ANN401 - anything JSON can carry
    """Compact ASCII JSON."""
    return _encode_json(value).encode("ascii")


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Bytes of one frame. Raises ProtocolError when it would be over the limits."""
    raw = encode_json(header)
    if len(raw) > MAX_HEADER or len(body) > MAX_BODY:
        raise ProtocolError(f"a frame of {len(raw)} + {len(body)} bytes is over the limit")
    return b"".join((PREFIX.pack(MAGIC, len(raw), len(body)), raw, body))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decode_json = json.JSONDecoder(parse_constant=_refuse_constant).decode


def decode_json(raw: bytes) -> Any:  # noqa: ANN401 - JSON is what it is; callers check
    """Parse JSON from an untrusted peer. Raises ProtocolError for anything that is not strict UTF-8 JSON."""
    try:
        return _decode_json(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not valid JSON: {error}") from error


class Decoder:
    """Cuts a stream of bytes, in whatever pieces it comes, into frames.

    With `seeking` it passes over garbage until the first valid frame: a virtio serial port has no notion of a
    connection, so the first bytes read may be the end of somebody else's conversation.
    """

    def __init__(self, *, seeking: bool = False) -> None:
        self._buffer = bytearray()
        self._seeking = seeking
        self._skipped = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Take in bytes, give back the frames that are complete. Raises ProtocolError on a violation."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while True:
            try:
                frame, end = self._cut(start)
            except ProtocolError:
                if not self._seeking:
                    raise
                start = self._skip(start)
                continue
            if frame is None:
                break
            frames.append(frame)
            self._seeking = False
            start = end
        del buffer[:start]
        return frames

    def resync(self) -> None:
        """Forget what is half read and look for the next valid frame."""
        self._buffer.clear()
        self._seeking = True
        self._skipped = 0

    def _cut(self, start: int) -> tuple[Frame | None, int]:
        """The frame that begins at `start` and where it ends, or None while it is incomplete."""
        buffer = self._buffer
        available = len(buffer) - start
        if available < PREFIX.size:
            if buffer[start : start + 4] != MAGIC[:available]:
                raise ProtocolError("not a frame: the magic is missing")
            return None, start
        magic, header_size, body_size = PREFIX.unpack_from(buffer, start)
        if magic != MAGIC:
            raise ProtocolError("not a frame: the magic is missing")
        if header_size > MAX_HEADER or body_size > MAX_BODY:
            raise ProtocolError(f"a frame of {header_size} + {body_size} bytes is over the limit")
        middle = start + PREFIX.size + header_size
        end = middle + body_size
        if len(buffer) < end:
            return None, start
        header = decode_json(bytes(buffer[start + PREFIX.size : middle]))
        if not isinstance(header, dict):
            raise ProtocolError("a frame's header is not an object")
        return Frame(header, bytes(buffer[middle:end])), end

    def _skip(self, start: int) -> int:
        """Where the next frame might begin."""
        found = self._buffer.find(MAGIC, start + 1)
        if found < 0:  # the last bytes may be a magic cut in two
            found = max(start + 1, len(self._buffer) - len(MAGIC) + 1)
        self._skipped += found - start
        if self._skipped > MAX_SKIP:
            self._seeking = False
            raise ProtocolError(f"no frame in {self._skipped} bytes")
        return found
