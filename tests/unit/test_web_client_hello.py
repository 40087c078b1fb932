"""What a proxy can read of a TLS connection, from ClientHellos that Python's own TLS makes."""

import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from websearch.client_hello import MAX_RECORDS, ClientHello, HelloReader, NotTls, parse_client_hello


def hello(server_name: str | None) -> bytes:
    """Return the first bytes that a TLS client sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def with_extension(data: bytes, kind: int, content: bytes) -> bytes:
    """Return a ClientHello with one more extension at its end."""
    extension = kind.to_bytes(2, "big") + len(content).to_bytes(2, "big") + content
    body = bytearray(data[9:])
    at = 34
    at += 1 + body[at]  # session id
    at += 2 + int.from_bytes(body[at : at + 2], "big")  # cipher suites
    at += 1 + body[at]  # compression methods
    size = int.from_bytes(body[at : at + 2], "big") + len(extension)
    body[at : at + 2] = size.to_bytes(2, "big")
    body += extension
    message = b"\x01" + len(body).to_bytes(3, "big") + bytes(body)
    return data[:3] + len(message).to_bytes(2, "big") + message


def in_records(data: bytes, size: int) -> bytes:
    """Return a ClientHello cut into TLS records of `size` bytes."""
    message = data[5:]
    parts = [message[i : i + size] for i in range(0, len(message), size)]
    return b"".join(data[:3] + len(part).to_bytes(2, "big") + part for part in parts)


def test_the_server_name_is_read():
    assert parse_client_hello(hello("example.com")) == ClientHello("example.com", False)


def test_a_client_hello_without_a_name_is_read():
    assert parse_client_hello(hello(None)) == ClientHello(None, False)


def test_an_encrypted_client_hello_is_noticed():
    data = with_extension(hello("example.com"), 0xFE0D, b"secret")
    assert parse_client_hello(data) == ClientHello("example.com", True)


def test_every_beginning_of_a_client_hello_needs_more_bytes():
    data = hello("example.com")
    assert {parse_client_hello(data[:size]) for size in range(len(data))} == {None}


@pytest.mark.parametrize("size", [50, 300])
def test_a_client_hello_in_several_records_is_put_together(size):
    data = in_records(hello("example.com"), size)
    assert parse_client_hello(data) == ClientHello("example.com", False)
    assert {parse_client_hello(data[:end]) for end in range(len(data))} == {None}


def test_a_client_hello_is_read_as_its_bytes_arrive():
    reader, data = HelloReader(), in_records(hello("example.com"), 100)
    answers = [reader.feed(bytes([byte])) for byte in data]
    assert answers == [None] * (len(data) - 1) + [ClientHello("example.com", False)]
    assert reader.data == data


def test_a_client_hello_in_very_many_records_is_refused():
    data = in_records(hello("example.com"), 1)
    assert parse_client_hello(data[: 6 * MAX_RECORDS]) is None
    with pytest.raises(NotTls, match="records"):
        parse_client_hello(data[: 6 * (MAX_RECORDS + 1)])


def test_what_follows_a_client_hello_is_ignored():
    assert parse_client_hello(hello("example.com") + b"early data") == ClientHello("example.com", False)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\x15\x03\x01\x00\x02\x02\x28",  # an alert
        b"\x16\x02\x01\x00\x05\x01\x00\x00\x01\x00",  # a version before SSL 3.0
        b"\x16\x03\x01\xff\xff\x01",  # a record that is too long
        b"\x16\x03\x01\x00\x00",  # an empty record
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",  # a ServerHello
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",  # 16 MB
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",  # cut short
    ],
)
def test_anything_else_is_not_tls(data):
    with pytest.raises(NotTls):
        parse_client_hello(data)


def test_two_server_names_are_refused():
    entry = b"\x00\x00\x0bexample.org"
    data = with_extension(hello("example.com"), 0, len(entry).to_bytes(2, "big") + entry)
    with pytest.raises(NotTls):
        parse_client_hello(data)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_client_hellos_are_read_or_refused(garbage, at):
    data = hello("example.com")
    with suppress(NotTls):
        parse_client_hello(data[:at] + garbage + data[at:])
