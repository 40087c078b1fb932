"""A command whose shell, started ahead of it, was killed before it began."""

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from guest.agent.command import Command
from guest.agent.shell import Shell
from guest.errors import RequestRefused

KILLED, EXITED = 9, 0  # as `waitpid` reports them


class StubRun:
    stopped = False
    over_memory = "the shell was ended for its memory"
    refused: tuple[str, str] | None = None

    def refuse(self, code: str, message: str) -> None:
        self.refused = (code, message)


class Bench:
    """A shell that only says what it is told to start."""

    def __init__(self) -> None:
        self.run = StubRun()
        self.unread, self.orders = os.pipe()
        stub = cast("Any", StubStreams())
        record = os.memfd_create("session")
        self.command = Command(cast("Any", self.run), cast("Any", None), stub, stub, record, 1, unread=self.unread)
        self.shell = Shell.__new__(Shell)
        self.shell.commands = [self.command]
        self.started: list[object] = []
        self.failure: Exception | None = None
        self.shell.start = cast("Any", self._start)  # type: ignore[method-assign]

    def _start(self, run: object, _ended: Callable[..., None]) -> None:
        self.started.append(run)
        if self.failure:
            raise self.failure

    def end(self, status: int) -> None:
        self.shell._shell_ended(self.command, lambda *_: None, status)


class StubStreams:
    def end(self) -> None: ...

    def release(self) -> None: ...


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    os.close(bench.orders)


def test_it_starts_in_a_shell_of_its_own(bench: Bench):
    os.write(bench.orders, b"\n")  # it is still there
    bench.end(KILLED)
    assert bench.started == [bench.run]
    assert bench.shell.commands == []
    assert bench.run.over_memory == ""
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bench.unread)


@pytest.mark.parametrize(
    ("failure", "code"),
    [(RequestRefused("busy", "too many"), "busy"), (OSError(24, "Too many open files"), "no_kernel")],
)
def test_it_is_refused_if_that_is_not_possible(bench: Bench, failure: Exception, code: str):
    os.write(bench.orders, b"\n")
    bench.failure = failure
    bench.end(KILLED)
    assert bench.run.refused is not None
    assert bench.run.refused[0] == code


@pytest.mark.parametrize(("written", "status"), [(b"", KILLED), (b"\n", EXITED)])
def test_one_that_began_is_not_started_again(
    bench: Bench, written: bytes, status: int, monkeypatch: pytest.MonkeyPatch
):
    ended: list[Command] = []
    monkeypatch.setattr(Command, "shell_ended", lambda command, *_: ended.append(command))
    bench.shell._loop = cast("Any", None)
    os.write(bench.orders, written)
    bench.end(status)
    assert (bench.started, ended) == ([], [bench.command])
    bench.command.discard()
