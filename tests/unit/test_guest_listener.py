"""Hosts that connect to an agent: over a Unix socket here, over vsock in a machine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from guest.agent.listener import Listener
from guest.agent.loop import Link, Loop
from guest.protocol import Decoder, Frame, encode

LIMIT_S = 10.0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The address of a listener that sends every frame back and ends when one asks for it."""
    loop, path = Loop(), tmp_path / "socket"

    def echo(frame: Frame) -> None:
        link.send(*frame)
        if frame.header.get("stop"):
            loop.stop()

    def gone() -> None:
        listener.next()

    link = Link(loop, None, echo, gone)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listener = Listener(loop, listening, link)
        thread = threading.Thread(target=loop.run)
        thread.start()
        yield path
        with connected(path) as last:
            assert ask(last, {"stop": True}) == {"stop": True}
        thread.join()


@contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect(str(path))
        yield connection


def ask(connection: socket.socket, header: dict[str, object], body: bytes = b"") -> dict[str, object]:
    connection.sendall(encode(header, body))
    decoder, frames = Decoder(), list[Frame]()
    while not frames:
        data = connection.recv(65536)
        assert data, "the agent hung up"
        frames = decoder.feed(data)
    assert frames[0].body == body
    return frames[0].header


def test_the_next_host_is_served_when_the_first_has_gone(place):
    for number in range(3):
        with connected(place) as host:
            assert ask(host, {"n": number}) == {"n": number}
            assert ask(host, {"n": number}, b"x" * 1_000_000) == {"n": number}


def test_a_new_connection_replaces_one_whose_end_was_never_reported(place):
    with connected(place) as first:
        ask(first, {"n": 1})
        with connected(place) as second:
            assert ask(second, {"n": 2}) == {"n": 2}
            assert first.recv(1) == b""


def test_half_a_frame_of_one_host_does_not_affect_the_next(place):
    for rest in (encode({"n": 1})[:-3], encode({"n": 2}, b"x" * 1000)[:-1], b"noise"):
        with connected(place) as host:
            host.sendall(rest)
    with connected(place) as host:
        assert ask(host, {"n": 4}) == {"n": 4}


def test_a_host_that_sends_and_leaves_at_once_does_not_block_the_next(place):
    for _ in range(50):
        with connected(place) as host:
            host.sendall(encode({"n": 1}))
    with connected(place) as host:
        assert ask(host, {"n": 2}) == {"n": 2}


def test_unread_frames_of_one_host_are_not_sent_to_the_next(place):
    with connected(place) as host:
        for _ in range(3):
            host.sendall(encode({"n": 1}, b"x" * 1_000_000))
            host.recv(1)
    with connected(place) as host:
        assert ask(host, {"n": 2}) == {"n": 2}
