"""Which processes belong to which run, while several are active, and how they end with it."""

import os
from collections.abc import Callable

from guest.agent.children import Children
from guest.agent.process_list import UNLISTED, ProcessList
from guest.agent.sweep import broadcast_to
from guest.agent.user import User
from guest.processes import FEW, Process, end_all, process_count, process_table, tree_of, visible_pids

END_S = 1.0  # for the processes of a run; the host waits 3 s for the end of one that it stops

Table = dict[int, Process]


class RunProcesses:
    """All processes that one run starts, whatever sessions they open and whether their parents are alive.

    A shell adopts the orphans of its command. Everybody else's orphans become children of the agent: those of a shell
    that has exited, and those of code. So the run has what is below its root, and each descendant of the agent that
    was not there when the run began, and does not descend from one that was or from another run's root. If another
    run may have left orphans, too, only those are taken that are in the session of the root or older than that run.
    """

    def __init__(self, ledger: "Ledger", *, root: int = 0, hosted: bool = False) -> None:
        """Remember which processes there are before the run begins."""
        self.root = root  # the shell or the kernel; 0: it has not started yet
        self.orphans = root > 0  # it may have left some that are children of the agent
        self._hosted = hosted  # an interpreter below the root runs the code
        self._ledger = ledger
        self._doomed: set[int] = set()
        self.before = ledger.listed.pids()
        self._mark = ledger.listed.mark

    def adopt(self, root: int) -> None:
        """Let a process that was there before be its root."""
        self.root = root
        self.before = self.before - {root}
        self._mark = UNLISTED  # in gVisor, a child that was there already would not show that something runs

    @property
    def any_left(self) -> bool:
        """Whether there may be some, besides those below its root."""
        if not self._ledger.listed.may_have_orphans(self._mark):
            return False
        if not visible_pids() - self.before - self._ledger.keep():
            return False
        return not self._ledger.others(self) or bool(self._find(0))

    def doom(self) -> None:
        """Remember what is below the root: it is to end, whatever becomes of its parents.

        That matters only beside other runs. Otherwise it would cost time while a fork bomb leaves none.
        """
        if self._ledger.others(self):
            self._doomed = tree_of({self.root}, process_table())

    def end(self, *, below: int = 0) -> int:
        """Kill them; returns how many there were. `below` is a process that stays, but not what the run started in it.

        Without `below` the descendants of a kernel stay with it.
        """
        ended: set[int] = set()

        def find() -> set[int]:
            found = self._find(below)
            ended.update(found)
            return found

        ledger = self._ledger
        if below or self.any_left:
            few = process_count() <= len(self.before) + FEW
            end_all(find, ledger.children.reap, END_S, ledger.broadcast, few=few)
        return len(ended)

    def keep(self) -> None:
        """Leave them running, whatever other runs end."""
        if self._ledger.others(self):
            table = process_table()
            sessions = {run.root for run in self._rivals(table)}
            self._ledger.kept |= {pid for pid in self._candidates(table, 0) if table[pid].session not in sessions}

    def release(self) -> None:
        """Note that the run is over."""
        if self in self._ledger.active:
            self._ledger.active.remove(self)

    def _find(self, below: int) -> set[int]:
        table = process_table()
        found = self._candidates(table, below)
        if rivals := self._rivals(table):
            older = set.intersection(*(run.before for run in rivals))  # none of them has started these
            own = self._doomed | older
            sure = {pid for pid in found if table[pid].session == self.root or pid in own}
            found &= tree_of((sure | {self.root}) - {0}, table)  # 0 is the parent of all
        return {pid for pid in found if not table[pid].zombie}

    def _candidates(self, table: Table, below: int) -> set[int]:
        agent = os.getpid()
        tree = tree_of({agent}, table) - {agent}
        roots = {other.root for other in self._ledger.others(self)}
        inside = {below}  # what runs the code, and stays
        if below and self._hosted:
            inside |= {pid for pid in self.before & table.keys() if table[pid].parent == below}
        spared = (self.before | self._ledger.keep() | self._ledger.kept | roots) - inside
        return tree - tree_of(tree & spared, table) - inside

    def _rivals(self, table: Table) -> list["RunProcesses"]:
        """Return other runs that may have left orphans. The end of a shell may not be reported yet."""
        others = self._ledger.others(self)
        return [run for run in others if run.orphans or run.root not in table or table[run.root].zombie]


class Ledger:
    """The processes of all active runs. `keep` returns processes that are never ended for a run: kernel, service, …"""

    def __init__(self, user: User, children: Children, keep: Callable[[], set[int]], listed: ProcessList) -> None:
        self.children = children
        self.keep = keep
        self.listed = listed
        self.broadcast = broadcast_to(user)
        self.active: list[RunProcesses] = []
        self.kept: set[int] = set()  # what runs have left on purpose while others were active

    def begin(self, root: int = 0, *, hosted: bool = False) -> RunProcesses:
        """Begin a run. A shell that is its root starts afterwards. `hosted`: a child of the root runs the code."""
        if not self.active:
            self.kept.clear()  # each later run finds them there when it begins
        run = RunProcesses(self, root=root, hosted=hosted)
        self.active.append(run)
        return run

    def others(self, run: RunProcesses) -> list[RunProcesses]:
        """Return the other active runs."""
        return [other for other in self.active if other is not run]
