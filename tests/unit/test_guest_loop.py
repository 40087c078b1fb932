"""The agent's event loop and its links, on sockets of this process."""

import os
import socket
import time

import pytest

from guest.agent.loop import READ_BYTES, Link, Loop
from guest.protocol import Frame, encode


def test_a_handler_that_fails_is_printed_and_the_loop_goes_on(capsys):
    loop = Loop()
    read, write = os.pipe()
    os.write(write, b"x")

    def fail(_events: int = 0) -> None:
        raise OverflowError("a bug")

    loop.add(read, fail)
    loop.soon(fail)
    loop.later(0, fail)
    loop.later(0, loop.stop)
    loop.run()
    os.close(read)
    os.close(write)
    assert capsys.readouterr().err.count("OverflowError: a bug") == 3


def test_the_clock_is_read_once_a_round(monkeypatch):
    loop = Loop()
    loop.later(60, loop.stop)
    rounds, reads, clock = 0, 0, time.monotonic

    def read_clock() -> float:
        nonlocal reads
        reads += 1
        return clock()

    def go_on() -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 10:
            loop.soon(go_on)
        else:
            loop.stop()

    monkeypatch.setattr(time, "monotonic", read_clock)
    loop.soon(go_on)
    loop.run()
    assert (rounds, reads) == (10, 10)


def test_a_timer_is_not_late_by_what_the_handler_took_that_set_it(monkeypatch):
    now, waited = 0.0, []

    class Clockwork:
        def poll(self, timeout: float) -> list[tuple[int, int]]:
            nonlocal now
            now += timeout
            waited.append(timeout)
            return []

    def work() -> None:
        nonlocal now
        now += 0.1
        loop.later(0.01, work if len(waited) < 3 else loop.stop)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    loop = Loop()
    monkeypatch.setattr(loop, "_epoll", Clockwork())
    loop.later(0.01, work)
    loop.run()
    assert waited == pytest.approx([0.01] * 4)


def test_a_flood_on_one_link_does_not_hold_up_the_others():
    """Every frame that is read is followed by the next one at once, as many as the test allows."""
    loop = Loop()
    ours, theirs = socket.socketpair()
    header = {"event": "x"}
    frame = encode(header, b"x" * (READ_BYTES - len(encode(header))))
    assert len(frame) == READ_BYTES
    taken, allowed, seen = 0, 1000, []

    def take(_frame: Frame) -> None:
        nonlocal taken
        taken += 1
        if taken < allowed:
            theirs.sendall(frame)
        else:
            loop.stop()

    def other(_events: int) -> None:
        seen.append(taken)
        loop.stop()

    control = ours.detach()
    link = Link(loop, (control, control), take, loop.stop, loop.stop)
    theirs.sendall(frame)
    read, write = os.pipe()
    loop.soon(lambda: loop.add(read, other))  # after the first turn of the link
    os.write(write, b"x")
    loop.run()
    link.close()
    theirs.close()
    os.close(read)
    os.close(write)
    assert seen
    assert seen[0] < allowed


def test_whatever_cannot_be_handled_is_nonsense_and_not_the_end_of_the_loop(capsys):
    loop = Loop()
    ours, theirs = socket.socketpair()
    control = ours.detach()
    heard: list[str] = []

    def take(_frame: Frame) -> None:
        raise RecursionError("too deep")

    def nonsense() -> None:
        heard.append("nonsense")
        link.close()
        loop.stop()

    link = Link(loop, (control, control), take, loop.stop, nonsense)
    theirs.sendall(encode({"event": "x"}))
    loop.run()
    theirs.close()
    assert heard == ["nonsense"]
    assert "RecursionError" in capsys.readouterr().err
