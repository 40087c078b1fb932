"""Undoes what servers do to bytes: compression, within a limit, and character encodings."""

import codecs
import re
import zlib
from collections.abc import Callable, Iterator

import brotli
from charset_normalizer import from_bytes

from guest.web.errors import WebError

STEP = 256 * 1024  # bytes that are decompressed at once: a bomb is noticed before it grows
SAMPLE = 64 * 1024  # bytes from which an encoding is guessed
GZIP_OR_ZLIB, RAW_DEFLATE = 47, -15  # window bits, as zlib wants them
ENCODINGS = 3  # of one response
BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
DECLARED = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE
)
# What browsers read under these names, because pages mean it.
USUAL = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "iso8859-9": "cp1254",
    "tis-620": "cp874",
}
NOT_ENCODINGS = {"utf-7", "unicode_escape", "raw_unicode_escape", "idna", "punycode", "undefined", "mbcs", "oem"}


def decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """Undo the Content-Encoding of a response. Raises WebError if it is unknown, broken or too large."""
    names = [name.strip().lower() for name in encoding.split(",") if name.strip()]
    if len(names) > ENCODINGS:
        raise WebError("bad_response", "the server compressed the page too many times")
    for name in reversed(names):
        if name == "identity":
            continue
        if name not in DECODERS:
            raise WebError("bad_response", f"the server used an unknown compression: {name[:40]!r}")
        data = _collect(DECODERS[name](data), max_bytes)
    return data


def _collect(pieces: Iterator[bytes], max_bytes: int) -> bytes:
    found = bytearray()
    try:
        for piece in pieces:
            found += piece
            if len(found) > max_bytes:
                raise WebError("too_large", f"it has more than {max_bytes} bytes when decompressed", limit=max_bytes)
    except (zlib.error, brotli.error) as error:
        raise WebError("bad_response", f"its compression is broken: {error}") from error
    return bytes(found)


def _inflate(data: bytes, bits: int = GZIP_OR_ZLIB) -> Iterator[bytes]:
    while data:
        decoder = zlib.decompressobj(bits)
        while data and not decoder.eof:
            yield decoder.decompress(data, STEP)
            data = decoder.unconsumed_tail
        if not decoder.eof:  # the data ends too early
            yield decoder.flush()
        data = decoder.unused_data if bits == GZIP_OR_ZLIB else b""  # a gzip file may have several members


def _deflate(data: bytes) -> Iterator[bytes]:
    """Some servers send zlib under this name, as they should, others raw deflate."""
    is_zlib = len(data) > 1 and data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return _inflate(data, GZIP_OR_ZLIB if is_zlib else RAW_DEFLATE)


def _brotli(data: bytes) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    piece = decoder.process(data, output_buffer_limit=STEP)
    while piece:
        yield piece
        if decoder.is_finished():
            return
        piece = decoder.process(b"", output_buffer_limit=STEP)


DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _inflate,
    "x-gzip": _inflate,
    "deflate": _deflate,
    "br": _brotli,
}


def decode(data: bytes, declared: str | None) -> tuple[str, str]:
    """Return text and the encoding it was in: by its first bytes, as declared, or as it looks."""
    found = DECLARED.search(data[:4096])
    named = [declared, found[1].decode("ascii") if found else None, "utf-8"]
    marked = next((name for mark, name in BOMS if data.startswith(mark)), None)
    for name in filter(None, [marked, *named]):
        codec = _codec(name)
        if codec is not None:
            try:
                return data.decode(codec), codec
            except UnicodeError:
                continue
    guess = from_bytes(data[:SAMPLE]).best()
    codec = guess.encoding if guess else next(filter(None, map(_codec, filter(None, named))), "utf-8")
    return data.decode(codec, "replace"), codec


def _codec(name: str) -> str | None:
    """Return Python's name of an encoding, or None if it is no text encoding that pages have."""
    try:
        info = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    if info.name in NOT_ENCODINGS or not info._is_text_encoding:  # noqa: SLF001 - codecs says it nowhere else
        return None
    return USUAL.get(info.name, info.name)
