"""Finding and ending processes, without starting any."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from guest import processes
from guest.processes import Process, end_all, oom_kills, process_table, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable


def table(**parents: int) -> dict[int, Process]:
    return {int(name.removeprefix("p")): Process(parent, 1, 4096) for name, parent in parents.items()}


def test_a_tree_has_all_descendants_and_no_others():
    found = table(p1=0, p2=1, p3=2, p4=3, p5=1, p6=5)
    assert tree_of({2}, found) == {2, 3, 4}
    assert tree_of({4, 5}, found) == {4, 5, 6}
    assert tree_of({9}, found) == {9}


def test_processes_that_are_each_others_parents_do_not_hang():
    """The table is not read at one moment, so it need not be consistent."""
    assert tree_of({1}, table(p1=2, p2=1)) == {1, 2}


def test_this_process_is_in_the_table():
    mine = process_table()[os.getpid()]
    assert (mine.parent, mine.group) == (os.getppid(), os.getpgrp())
    assert mine.resident_bytes > 1024 * 1024


class Host:
    """Processes that end when they are killed, but not all at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rounds: int) -> None:
        self.rounds = rounds
        self.broadcasts: list[int] = []
        self.killed = 0
        monkeypatch.setattr(processes, "signal_all", self._signal)
        monkeypatch.setattr(processes, "FEW_S", 0.0)

    def _signal(self, pids: set[int], number: int) -> None:
        assert number == signal.SIGKILL
        self.killed += len(pids)

    def find(self) -> set[int]:
        self.rounds -= 1
        return {7} if self.rounds >= 0 else set()

    def reap(self) -> None:
        pass

    def end(self, *, few: bool, limit_s: float = 60.0) -> bool:
        broadcast: Callable[[int], None] = self.broadcasts.append
        return end_all(self.find, self.reap, limit_s, broadcast, few=few)


def test_a_few_processes_are_ended_without_disturbing_others(monkeypatch):
    host = Host(monkeypatch, rounds=0)
    assert host.end(few=True)
    assert host.broadcasts == []


def test_many_processes_are_stopped_while_they_are_looked_for_and_the_others_go_on(monkeypatch):
    host = Host(monkeypatch, rounds=2)
    assert host.end(few=False)
    assert host.broadcasts == [signal.SIGSTOP] * 3 + [signal.SIGCONT]
    assert host.killed == 2


def test_a_few_that_do_not_end_are_treated_as_many(monkeypatch):
    host = Host(monkeypatch, rounds=2)
    assert host.end(few=True)
    assert host.broadcasts == [signal.SIGSTOP] * 2 + [signal.SIGCONT]


def test_processes_that_never_end_are_given_up_and_all_others_go_on(monkeypatch):
    host = Host(monkeypatch, rounds=10**9)
    assert not host.end(few=False, limit_s=0.0)
    assert host.broadcasts == [signal.SIGSTOP, signal.SIGCONT]


def test_the_kernels_count_of_oom_kills_is_read():
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert oom_kills() >= int(counters["oom_kill"])
