"""Processes are listed only after some may have been started."""

from pathlib import Path

import pytest

from guest.agent import process_list
from guest.agent.process_list import ProcessList

KERNEL = 7


class Proc:
    """The files that are read, and the processes that a list finds."""

    def __init__(self, folder: Path, last_pid: int) -> None:
        self.folder = folder
        self.lists = 0
        self.pids = {1, KERNEL}
        self.start(last_pid)
        self.adopt(1)
        self.adopt(KERNEL)

    def start(self, last_pid: int) -> None:
        (self.folder / "loadavg").write_text(f"0.42 0.30 0.25 1/523 {last_pid}\n")

    def adopt(self, parent: int, *children: int) -> None:
        (self.folder / f"children-{parent}").write_text("".join(f"{child} " for child in children))

    def list(self) -> set[int]:
        self.lists += 1
        return set(self.pids)


@pytest.fixture(params=[0, 40], ids=["gvisor", "linux"])
def proc(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    proc = Proc(tmp_path, request.param)
    monkeypatch.setattr(process_list, "LOAD", str(tmp_path / "loadavg"))
    monkeypatch.setattr(process_list, "CHILDREN", str(tmp_path / "children-{0}"))
    monkeypatch.setattr(process_list, "visible_pids", proc.list)
    monkeypatch.setattr("os.getpid", lambda: 1)
    return proc


def test_processes_are_listed_once_while_none_is_started(proc: Proc):
    listed = ProcessList(lambda: KERNEL)
    assert [listed.pids(), listed.pids()] == [{1, KERNEL}] * 2
    assert not listed.may_have_orphans(listed.mark)
    assert proc.lists == 1


def test_an_orphan_is_noticed(proc: Proc):
    listed = ProcessList(lambda: KERNEL)
    listed.pids()
    proc.adopt(1, KERNEL, 41)
    proc.start(41 if listed._counts else 0)
    assert listed.may_have_orphans(listed.mark)


def test_a_child_of_the_kernel_is_listed(proc: Proc):
    listed = ProcessList(lambda: KERNEL)
    listed.pids()
    proc.adopt(KERNEL, 41)
    proc.start(41 if listed._counts else 0)
    proc.pids.add(41)
    assert listed.pids() == {1, KERNEL, 41}


def test_what_the_interpreter_below_the_kernel_starts_is_listed(proc: Proc):
    proc.adopt(KERNEL, 40)
    proc.adopt(40)
    proc.pids.add(40)
    listed = ProcessList(lambda: KERNEL)
    assert listed.pids() == {1, KERNEL, 40}
    proc.adopt(40, 41)
    proc.start(41 if listed._counts else 0)
    proc.pids.add(41)
    assert listed.pids() == {1, KERNEL, 40, 41}


def test_the_children_of_a_new_kernel_are_listed(proc: Proc):
    kernel = [KERNEL]
    listed = ProcessList(lambda: kernel[0])
    listed.pids()
    kernel[0], proc.pids = 0, {1}
    listed.pids()
    kernel[0], proc.pids = 40, {1, 40, 41}
    proc.adopt(40, 41)
    proc.start(41 if listed._counts else 0)
    assert listed.pids() == {1, 40, 41}
