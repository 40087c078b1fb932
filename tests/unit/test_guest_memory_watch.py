"""Which processes are ended when a machine has no memory left. Nothing here is a real machine."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest

from guest.agent import memory_watch
from guest.agent.memory_watch import LATEST_S, SOONEST_S, MemoryWatch
from guest.agent.user import MAX_PROCESSES, User
from guest.processes import Process

if TYPE_CHECKING:
    from guest.agent.children import Children
    from guest.agent.loop import Loop

MIB = 1024 * 1024
USER = User(1000, 1000, own_pids=False, memory_mb=512, own_kernel=True)
SHARED_KERNEL = User(None, None, own_pids=True, memory_mb=1024)
KERNEL, ITS_CHILD, SHELL, LEFTOVER, ZYGOTE = 10, 11, 20, 30, 40


class Timers:
    """Remembers when the next look is due, and what is to go on after the pending events."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.waiting: list[Callable[[], None]] = []

    def soon(self, action: Callable[[], None]) -> None:
        self.waiting.append(action)

    def go_on(self) -> int:
        turns = 0
        while self.waiting:
            self.waiting.pop()()
            turns += 1
        return turns

    def later(self, delay_s: float, _action: Callable[[], None]) -> None:
        self.delays.append(delay_s)


class Machine:
    """A made-up machine: the sizes of its processes in megabytes, and what was ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **sizes_mb: int) -> None:
        parents = {KERNEL: os.getpid(), ITS_CHILD: KERNEL, SHELL: os.getpid(), LEFTOVER: 1, ZYGOTE: os.getpid()}
        names = {"kernel": KERNEL, "its_child": ITS_CHILD, "shell": SHELL, "leftover": LEFTOVER, "zygote": ZYGOTE}
        self.table = {names[name]: Process(parents[names[name]], 0, size * MIB) for name, size in sizes_mb.items()}
        self.ended: list[int] = []
        self.killed: set[int] = set()
        self.used_mb: int | None = None  # None: the sum of the processes
        self.processes = 0
        monkeypatch.setattr(memory_watch, "process_count", lambda: self.processes)
        self.timers = Timers()
        monkeypatch.setattr(memory_watch, "process_table", lambda: self.table)
        monkeypatch.setattr(memory_watch, "owned_by", lambda user: set(self.table))
        monkeypatch.setattr(memory_watch, "broadcast_to", lambda user: None)
        monkeypatch.setattr(memory_watch, "end_all", lambda find, *_: self.killed.update(find()))
        monkeypatch.setattr(memory_watch, "_kilobytes", lambda *_: self._used() * 1024)

    def _used(self) -> int:
        processes = sum(process.resident_bytes for process in self.table.values()) // MIB
        return processes if self.used_mb is None else self.used_mb

    def watch(self, user: User = USER) -> None:
        roots = {KERNEL, SHELL} & self.table.keys()
        children = cast("Children", type("NoChildren", (), {"reap": None}))
        loop = cast("Loop", self.timers)
        MemoryWatch(loop, user, children, lambda: roots, lambda: {ZYGOTE}, self.ended.append).start()


def test_a_machine_within_its_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, kernel=400, shell=112)
    machine.watch()
    assert (machine.killed, machine.ended) == (set(), [])


def test_the_largest_job_is_ended_with_all_its_processes(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, kernel=100, its_child=300, shell=200)
    machine.watch()
    assert (machine.killed, machine.ended) == ({KERNEL, ITS_CHILD}, [KERNEL])


def test_a_command_that_takes_too_much_does_not_cost_the_variables_of_the_kernel(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, kernel=250, shell=300)
    machine.watch()
    assert (machine.killed, machine.ended) == ({SHELL}, [SHELL])


def test_what_earlier_runs_left_running_is_a_job_of_its_own(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, kernel=100, leftover=450)
    machine.watch()
    assert (machine.killed, machine.ended) == ({LEFTOVER}, [0])


def test_the_zygote_is_never_ended(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, zygote=600)
    machine.watch()
    assert (machine.killed, machine.ended) == (set(), [])


def test_files_count_against_the_machines_memory(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, kernel=90)
    machine.used_mb = 513
    machine.watch()
    assert machine.ended == [KERNEL]


def test_each_process_counts_for_what_it_costs_gvisors_kernel(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, kernel=90)
    machine.used_mb, machine.processes = 400, 113
    machine.watch()
    assert machine.ended == [KERNEL]


@pytest.mark.parametrize(("memory_mb", "most"), [(64, 16), (512, 128), (4096, MAX_PROCESSES)])
def test_a_gvisor_machine_has_as_many_processes_as_its_memory_has_room_for(memory_mb: int, most: int):
    assert User(1000, 1000, memory_mb=memory_mb, own_kernel=True).max_processes == most
    assert User(1000, 1000, memory_mb=memory_mb).max_processes == MAX_PROCESSES


@pytest.mark.parametrize(("used_mb", "delay_s"), [(1, LATEST_S), (112, 0.2), (511, SOONEST_S), (600, SOONEST_S)])
def test_the_less_memory_is_left_the_sooner_it_looks_again(
    monkeypatch: pytest.MonkeyPatch, used_mb: int, delay_s: float
):
    machine = Machine(monkeypatch, kernel=90)
    machine.used_mb = used_mb
    machine.watch()
    assert machine.timers.delays == [delay_s]


@pytest.mark.parametrize(("share_mb", "most_turns", "ended"), [(20, 12, []), (30, 9, [0])])
def test_the_agent_answers_while_it_adds_up_the_memory_that_many_processes_share(
    monkeypatch: pytest.MonkeyPatch, share_mb: int, most_turns: int, ended: list[int]
):
    machine = many_forks(monkeypatch, share_mb)
    machine.watch(SHARED_KERNEL)
    turns = machine.timers.go_on()
    assert 5 < turns <= most_turns
    assert machine.ended == ended
    assert len(machine.timers.delays) == 1


def test_memory_of_a_run_that_was_stopped_while_it_was_added_up_costs_no_other_job(monkeypatch: pytest.MonkeyPatch):
    machine = many_forks(monkeypatch, share_mb=30)
    machine.watch(SHARED_KERNEL)
    machine.table = {KERNEL: Process(os.getpid(), 0, 500 * MIB)}
    machine.timers.go_on()
    assert (machine.killed, machine.ended) == (set(), [])


def many_forks(monkeypatch: pytest.MonkeyPatch, share_mb: int) -> Machine:
    """Return a machine with 50 processes that use 100 MB each, most of it together."""
    machine = Machine(monkeypatch)
    machine.table = {pid: Process(os.getpid(), 0, 100 * MIB) for pid in range(100, 150)}
    machine.used_mb = share_mb  # of each
    monkeypatch.setattr(memory_watch, "writable_places", list)
    return machine


def test_a_machine_whose_kernel_limits_its_memory_is_not_watched(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, kernel=900)
    machine.watch(User(1000, 1000))
    assert machine.timers.delays == []
