"""The frame codec: any fragmentation, hard limits, resynchronisation."""

import json
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guest.errors import ProtocolError
from guest.protocol import MAGIC, MAX_BODY, MAX_HEADER, MAX_SKIP, PREFIX, Decoder, Frame, decode_json, encode

HEADERS = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20) | st.none(), max_size=4)
FRAMES = st.lists(st.tuples(HEADERS, st.binary(max_size=200)), max_size=6)


def raw_frame(header: bytes, body: bytes = b"") -> bytes:
    return PREFIX.pack(MAGIC, len(header), len(body)) + header + body


def feed_in_pieces(decoder: Decoder, data: bytes, cuts: list[int]) -> list[Frame]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    return [frame for piece in pieces for frame in decoder.feed(piece)]


@given(FRAMES, st.lists(st.integers(0, 10_000), max_size=20))
def test_frames_survive_any_fragmentation(frames, cuts):
    data = b"".join(encode(header, body) for header, body in frames)
    assert feed_in_pieces(Decoder(), data, cuts) == [Frame(*frame) for frame in frames]


@given(st.binary(max_size=300), FRAMES, st.lists(st.integers(0, 10_000), max_size=20))
def test_a_seeking_decoder_skips_garbage(garbage, frames, cuts):
    garbage = garbage.replace(b"M", b"m")
    data = garbage + b"".join(encode(header, body) for header, body in frames)
    assert feed_in_pieces(Decoder(seeking=True), data, cuts) == [Frame(*frame) for frame in frames]


@given(st.binary(max_size=2000), st.booleans())
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(data, seeking):
    decoder = Decoder(seeking=seeking)
    with suppress(ProtocolError):
        decoder.feed(data)
        decoder.feed(MAGIC + data)


def test_a_seeking_decoder_skips_a_false_magic():
    good = encode({"id": 1})
    assert Decoder(seeking=True).feed(MAGIC + b"\xff" * 8 + good) == [Frame({"id": 1}, b"")]
    assert Decoder(seeking=True).feed(raw_frame(b"not json") + good) == [Frame({"id": 1}, b"")]


def test_after_the_first_frame_garbage_is_an_error():
    decoder = Decoder(seeking=True)
    decoder.feed(b"noise" + encode({"id": 1}))
    with pytest.raises(ProtocolError):
        decoder.feed(b"noise")


def test_seeking_is_limited():
    decoder = Decoder(seeking=True)
    decoder.feed(b"x" * (MAX_SKIP - 10))
    with pytest.raises(ProtocolError, match="no frame in"):
        decoder.feed(b"x" * 100)


def test_a_decoder_can_resynchronise():
    decoder = Decoder()
    decoder.feed(encode({"id": 1}, b"x" * 100)[:-50])
    decoder.resync()
    assert decoder.feed(b"rest of something" + encode({"id": 2})) == [Frame({"id": 2}, b"")]


@pytest.mark.parametrize(("header_size", "body_size"), [(MAX_HEADER + 1, 0), (2, MAX_BODY + 1), (2**32 - 1, 2**32 - 1)])
def test_a_giant_frame_is_refused_before_it_is_read(header_size, body_size):
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        Decoder().feed(PREFIX.pack(MAGIC, header_size, body_size))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"\xff\xfe{}",
        '{"a":1}'.encode("utf-16"),
        b'{"a":' * 10_000,
        b"[" * 60_000,
        b'{"a":' + b"9" * 20_000 + b"}",
    ],
)
def test_a_header_that_is_not_a_json_object_is_a_protocol_error(header):
    with pytest.raises(ProtocolError):
        Decoder().feed(raw_frame(header))


def test_an_oversized_frame_is_not_even_encoded():
    with pytest.raises(ProtocolError):
        encode({"id": 1}, b"x" * (MAX_BODY + 1))
    with pytest.raises(ProtocolError):
        encode({"id": "x" * MAX_HEADER})


def test_json_survives_a_round_trip():
    value = {"text": "ünïcode \ud800", "number": 1.5, "deep": [{"a": None}]}
    assert decode_json(json.dumps(value).encode()) == value
