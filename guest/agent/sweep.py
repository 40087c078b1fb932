"""Ends all that code has left running, and waits until nothing of it is left."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH116, PTH123, PTH208

import os
import signal
import time
from contextlib import suppress

from guest.agent.children import Children
from guest.agent.user import User

NOBODY = 65534
LIMIT_S = 5.0  # for the dead to be reaped; they count against the user's limits until then
PAUSE_S = 0.001  # between two looks; most often one is enough
BURST = 50  # signals in a row: where one does not reach all at once (gVisor), what forks without end has no time to
MAX_PASSES = 1000  # of stopping; each finds what was forked during the last, until there is nothing left to fork


def sweep(user: User, children: Children, spared: set[int], service: int = 0) -> None:
    """Kill all that the user runs, but for the process `service`, if there is one, and those below it.

    Where the agent is the same user: all there is but that, the agent and those spared.
    """
    if user.uid is not None and user.gid is not None:
        pid = os.fork()
        if pid == 0:
            try:
                _kill_user(user.uid, user.gid, service)
            finally:
                os._exit(0)
        children.reap(until=pid)
    elif user.own_pids:
        _kill_others({1, os.getpid(), *spared}, service, children)


def _kill_user(uid: int, gid: int, service: int) -> None:
    """Only in a process that ends with it. One signal reaches all that the user runs at once, so nothing can fork away
    from it; where a service is among them it only stops them, and those to be killed are looked for then."""
    deadline = time.monotonic() + LIMIT_S
    os.setgroups([])
    os.setgid(gid)
    os.setresuid(NOBODY, uid, NOBODY)  # its right to kill, without being anybody it may kill
    while True:
        with suppress(ProcessLookupError):
            for _ in range(BURST):
                os.kill(-1, signal.SIGSTOP if service else signal.SIGKILL)
        kept = _tree(service)
        left = {pid for pid in _processes() - {os.getpid()} - kept if _owner(pid) == uid}
        if service:
            _signal(left, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            _signal(kept, signal.SIGCONT)
            return
        time.sleep(PAUSE_S)


def _kill_others(spared: set[int], service: int, children: Children) -> None:
    """Stop everything first, so that nothing can fork away from being killed. The agent does it itself, not a child:
    if it is process 1 there is nothing the code can do to it."""
    deadline = time.monotonic() + LIMIT_S
    while (left := _processes() - spared - _tree(service)) and time.monotonic() < deadline:
        stopped: set[int] = set()
        for _ in range(MAX_PASSES):
            new = _processes() - spared - stopped - _tree(service)
            if not new:
                break
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(left | stopped, signal.SIGKILL)
        children.reap()
        time.sleep(PAUSE_S)


def _processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _tree(root: int) -> set[int]:
    """A process and all below it."""
    if not root:
        return set()
    parents = {pid: _parent(pid) for pid in _processes()}
    tree = {root}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])  # the name in front may have any character in it
    except OSError:  # gone
        return -1


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:  # gone
        return -1


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
