"""A name server on UDP port 53, which may answer differently each time."""

import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address

HEADER = struct.Struct(">HHHHHH")  # id, flags, and the numbers of questions, answers, authorities and further records
RECORD = struct.Struct(">HHHIH4s")  # name, type, class, seconds to live, length, address
QUESTION_NAME = 0xC000 | HEADER.size  # a pointer to the question
RESPONSE, UNKNOWN = 0x8580, 3
A, INTERNET = 1, 1
PORT = 53


class NameServer:
    """Knows some names, each with one address after the other; the last one stays."""

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self._names = {name: list(addresses) for name, addresses in names.items()}
        self.asked: list[str] = []  # for the IPv4 address of which names

    def answer(self, query: bytes) -> bytes:
        """Return the response to a query."""
        number = HEADER.unpack_from(query)[0]
        name, end = _question(query)
        (kind,) = struct.unpack_from(">H", query, end)
        records = b""
        if kind == A:
            self.asked.append(name)
            addresses = self._names.get(name, [])
            if addresses:
                address = addresses.pop(0) if len(addresses) > 1 else addresses[0]
                records = RECORD.pack(QUESTION_NAME, A, INTERNET, 0, 4, IPv4Address(address).packed)
        flags = RESPONSE | (0 if name in self._names else UNKNOWN)
        return HEADER.pack(number, flags, 1, bool(records), 0, 0) + query[HEADER.size : end + 4] + records


def _question(query: bytes) -> tuple[str, int]:
    """Return the name that a query is about, and where it ends."""
    labels, at = [], HEADER.size
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode("ascii").lower())
        at += 1 + size
    return ".".join(labels), at + 1


@contextmanager
def serving_names(server: NameServer, address: str) -> Iterator[None]:
    """Answer queries to an address from another thread, for lookups block theirs."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.bind((address, PORT))

        def serve() -> None:
            while (received := wire.recvfrom(4096))[0]:
                wire.sendto(server.answer(received[0]), received[1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", (address, PORT))
            thread.join()
