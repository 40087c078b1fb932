"""Which processes a run ends while others are active. Nothing here is a real process."""

import os
from typing import TYPE_CHECKING, cast

import pytest

from guest.agent import run_processes
from guest.agent.run_processes import Ledger, RunProcesses
from guest.agent.user import User
from guest.processes import Process

if TYPE_CHECKING:
    from guest.agent.children import Children
    from guest.agent.process_list import ProcessList

AGENT = os.getpid()
KERNEL = 10


class Machine:
    """A made-up process table with a kernel, and runs that come and go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = {AGENT: Process(1, 1, 0), KERNEL: Process(AGENT, KERNEL, 0, session=KERNEL)}
        self.started = 0
        self.mark = b""
        monkeypatch.setattr(run_processes, "process_table", lambda: dict(self.table))
        monkeypatch.setattr(run_processes, "visible_pids", self.alive)
        monkeypatch.setattr(run_processes, "process_count", lambda: len(self.table))
        monkeypatch.setattr(run_processes, "end_all", lambda find, *_, **__: self._kill(find()))
        children = cast("Children", type("NoChildren", (), {"reap": None}))
        self.ledger = Ledger(User(None, None), children, lambda: {KERNEL}, cast("ProcessList", self))

    def alive(self) -> set[int]:
        return set(self.table)

    # As `ProcessList` on Linux, where the pid that was assigned last is a counter.

    def pids(self) -> set[int]:
        self.mark = b"%d" % self.started
        return self.alive()

    def may_have_orphans(self, since: bytes) -> bool:
        return since != b"%d" % self.started

    def _kill(self, found: set[int]) -> None:
        for pid in found:
            del self.table[pid]

    def start(self, pid: int, parent: int, session: int) -> None:
        self.started += 1
        self.table[pid] = Process(parent, session, 0, session=session)

    def shell(self, pid: int) -> RunProcesses:
        run = self.ledger.begin()
        run.root = pid
        self.start(pid, AGENT, pid)
        return run

    def exit(self, run: RunProcesses) -> None:
        """End a shell: the agent adopts its children."""
        del self.table[run.root]
        for pid, process in self.table.items():
            if process.parent == run.root:
                self.table[pid] = process._replace(parent=AGENT)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_orphans_of_a_command_end_with_it_in_whatever_session(machine: Machine):
    run = machine.shell(20)
    machine.start(21, 20, 20)
    machine.start(22, 20, 22)
    machine.exit(run)
    assert run.end() == 2
    assert machine.alive() == {AGENT, KERNEL}


def test_what_is_below_the_shell_of_another_command_is_spared(machine: Machine):
    run, other = machine.shell(20), machine.shell(30)
    machine.start(21, 20, 21)
    machine.start(31, 30, 31)
    machine.exit(run)
    assert run.end() == 1
    assert machine.alive() == {AGENT, KERNEL, 30, 31}
    run.release()
    machine.exit(other)
    assert other.end() == 1


def test_of_two_commands_that_exit_at_once_each_ends_its_own_session(machine: Machine):
    run, other = machine.shell(20), machine.shell(30)
    machine.start(21, 20, 20)
    machine.start(22, 21, 22)  # in a session of its own, below one that is not
    machine.start(31, 30, 30)
    for each in (run, other):
        machine.exit(each)
    assert run.end() == 2
    assert machine.alive() == {AGENT, KERNEL, 31}


def test_an_orphan_that_two_runs_may_have_left_ends_with_the_last_of_them(machine: Machine):
    cell = machine.ledger.begin(KERNEL)
    run = machine.shell(20)
    machine.start(21, 20, 21)
    machine.start(11, AGENT, KERNEL)  # an orphan of the code
    machine.exit(run)
    assert run.end() == 0
    run.release()
    assert cell.end() == 2
    assert machine.alive() == {AGENT, KERNEL}


def test_a_stopped_command_ends_all_that_was_below_its_shell(machine: Machine):
    machine.ledger.begin(KERNEL)
    run = machine.shell(20)
    machine.start(21, 20, 21)
    run.doom()
    machine.exit(run)
    assert run.end() == 1


def test_what_a_command_keeps_is_spared_by_runs_that_began_before_it(machine: Machine):
    cell = machine.ledger.begin(KERNEL)
    run = machine.shell(20)
    machine.start(21, 20, 21)
    machine.start(11, AGENT, KERNEL)
    machine.exit(run)
    run.keep()
    run.release()
    assert cell.end(below=KERNEL) == 1
    assert machine.alive() == {AGENT, KERNEL, 21}
    cell.release()
    machine.ledger.begin()
    assert machine.ledger.kept == set(), "a run that begins later finds it there"


def test_a_run_that_started_nothing_looks_for_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    cell = machine.ledger.begin(KERNEL)
    monkeypatch.setattr(run_processes, "process_table", lambda: pytest.fail("this is expensive in gVisor"))
    assert cell.end() == 0


def test_a_daemon_ends_with_its_command_if_the_code_beside_it_began_later(machine: Machine):
    run = machine.shell(20)
    machine.start(21, 20, 21)
    cell = machine.ledger.begin(KERNEL)
    machine.start(11, AGENT, KERNEL)  # an orphan of the code
    machine.exit(run)
    assert run.end() == 1
    assert machine.alive() == {AGENT, KERNEL, 11}
    run.release()
    assert cell.end() == 1


def test_a_daemon_ends_with_the_last_run_that_may_have_started_it(machine: Machine):
    run, other = machine.shell(20), machine.shell(30)
    machine.start(21, 20, 21)
    machine.ledger.begin(KERNEL)
    for each in (run, other):
        machine.exit(each)
    assert run.end() == 0
    run.release()
    assert other.end() == 1
    assert machine.alive() == {AGENT, KERNEL}


def test_stopped_code_ends_what_it_started_in_its_interpreter(machine: Machine):
    machine.start(11, KERNEL, KERNEL)  # the interpreter
    machine.start(12, 11, KERNEL)  # of an earlier run
    cell = machine.ledger.begin(KERNEL, hosted=True)
    machine.start(13, 11, KERNEL)
    machine.start(14, 13, 14)
    machine.start(15, 12, KERNEL)
    assert cell.end(below=KERNEL) == 2
    assert machine.alive() == {AGENT, KERNEL, 11, 12, 15}


def test_stopped_code_spares_what_processes_of_earlier_code_start(machine: Machine):
    machine.start(11, KERNEL, KERNEL)  # a server
    cell = machine.ledger.begin(KERNEL)
    machine.start(12, 11, KERNEL)  # its worker
    machine.start(13, KERNEL, KERNEL)
    assert cell.end(below=KERNEL) == 1
    assert machine.alive() == {AGENT, KERNEL, 11, 12}


def test_a_shell_that_was_there_before_its_run_ends_with_it(machine: Machine):
    machine.start(20, AGENT, 20)
    run = machine.ledger.begin()
    run.adopt(20)
    assert run.any_left  # although nothing was started since
    assert run.end() == 1
    assert machine.alive() == {AGENT, KERNEL}


def test_a_shell_that_waits_for_the_next_run_belongs_to_none(machine: Machine):
    run = machine.shell(20)
    machine.start(21, AGENT, 21)
    machine.ledger.keep = lambda: {KERNEL, 21}
    assert run.end() == 1
    assert not run.any_left
    assert machine.alive() == {AGENT, KERNEL, 21}
