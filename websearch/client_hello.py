"""The first bytes of a TLS connection, which are not encrypted: the server name in them, and how to refuse it."""

import struct
from dataclasses import dataclass

RECORD = struct.Struct(">BHH")
ALERT, HANDSHAKE, CLIENT_HELLO = 21, 22, 1
TLS_1_2 = 0x0303  # what records of TLS 1.3 say, too
ACCESS_DENIED = RECORD.pack(ALERT, TLS_1_2, 2) + bytes((2, 49))  # a fatal alert (RFC 8446, 6.2); clients show its name
SERVER_NAME, ENCRYPTED_HELLO = 0, 0xFE0D  # extensions
HOST_NAME = 0
MAX_RECORD = 16 * 1024
MAX_RECORDS = 64  # of one ClientHello; clients that hide the name from filters use a few
MAX_HELLO = 32 * 1024  # bytes; with post-quantum keys a ClientHello has about 2 KiB


class NotTls(ValueError):
    """The bytes are not the beginning of a TLS connection."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a ClientHello says in the clear."""

    server_name: str | None
    encrypted: bool  # it carries another, encrypted ClientHello


def parse_client_hello(data: bytes) -> ClientHello | None:
    """Return the ClientHello at the beginning of `data`, or None if more bytes are needed. Raises NotTls."""
    return HelloReader().feed(data)


class HelloReader:
    """Reads a ClientHello as its bytes arrive, each of them once."""

    def __init__(self) -> None:
        self.data = bytearray()  # all that has arrived
        self._message = bytearray()  # what the whole records in it carry
        self._at = 0  # where the next record begins
        self._records = 0

    def feed(self, more: bytes) -> ClientHello | None:
        """Take further bytes; returns the ClientHello once it is complete. Raises NotTls."""
        self.data += more
        while (record := self._next_record()) is not None:
            self._message += record
            if self._message[0] != CLIENT_HELLO:
                raise NotTls("not a ClientHello")
            whole = 4 + int.from_bytes(self._message[1:4], "big")
            if whole > MAX_HELLO:
                raise NotTls(f"a ClientHello of {whole} bytes")
            if len(self._message) >= max(4, whole):
                return _parse(bytes(self._message[4:whole]))
        return None

    def _next_record(self) -> bytes | None:
        """Return what the next record carries, or None if it is not complete. Raises NotTls."""
        if len(self.data) > self._at and self.data[self._at] != HANDSHAKE:
            raise NotTls("not a TLS handshake")
        if len(self.data) < self._at + RECORD.size:
            return None
        _, version, size = RECORD.unpack_from(self.data, self._at)
        if version >> 8 != 3 or not 0 < size <= MAX_RECORD:
            raise NotTls("not a TLS record")
        begin, end = self._at + RECORD.size, self._at + RECORD.size + size
        if len(self.data) < end:
            return None
        self._at = end
        self._records += 1
        if self._records > MAX_RECORDS:
            raise NotTls(f"a ClientHello in more than {MAX_RECORDS} records")
        return bytes(self.data[begin:end])


def _parse(body: bytes) -> ClientHello:
    try:
        reader = _Reader(body)
        reader.skip(2 + 32)  # version, random
        reader.vector(1)  # session id
        reader.vector(2)  # cipher suites
        reader.vector(1)  # compression methods
        extensions = _Reader(reader.vector(2) if reader.left else b"")
        names: list[str] = []
        encrypted = False
        while extensions.left:
            kind, content = extensions.number(2), extensions.vector(2)
            encrypted |= kind == ENCRYPTED_HELLO
            if kind == SERVER_NAME:
                names += _server_names(content)
        if len(names) > 1:
            raise NotTls("several server names")
        return ClientHello(names[0] if names else None, encrypted)
    except (IndexError, UnicodeDecodeError) as error:
        raise NotTls("a malformed ClientHello") from error


def _server_names(content: bytes) -> list[str]:
    reader = _Reader(_Reader(content).vector(2))
    names = []
    while reader.left:
        if reader.number(1) != HOST_NAME:
            raise NotTls("a server name of an unknown kind")
        names.append(reader.vector(2).decode("ascii"))
    return names


class _Reader:
    """Takes numbers and vectors from the front of some bytes. Raises IndexError at their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def skip(self, size: int) -> bytes:
        if size > self.left:
            raise IndexError
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.skip(size), "big")

    def vector(self, size: int) -> bytes:
        """Return bytes that follow their length, a number of `size` bytes."""
        return self.skip(self.number(size))
