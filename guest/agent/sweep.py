"""Ends all that code has left running, and waits until nothing of it is left."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH116, PTH208

import os
import signal
import time
from contextlib import suppress

from guest.agent.children import Children
from guest.agent.user import User

NOBODY = 65534
LIMIT_S = 5.0  # for the dead to be reaped; they count against the user's limits until then
PAUSE_S = 0.001  # between two looks; most often one is enough
MAX_PASSES = 1000  # of stopping; each finds what was forked during the last, until there is nothing left to fork


def sweep(user: User, children: Children, spared: set[int]) -> None:
    """Kill all that the user runs. Where the agent is the same user: all there is but the agent and those spared."""
    if user.uid is not None and user.gid is not None:
        pid = os.fork()
        if pid == 0:
            try:
                _kill_user(user.uid, user.gid)
            finally:
                os._exit(0)
        children.reap(until=pid)
    elif user.own_pids:
        _kill_others({1, os.getpid(), *spared}, children)


def _kill_user(uid: int, gid: int) -> None:
    """Only in a process that ends with it."""
    deadline = time.monotonic() + LIMIT_S
    os.setgroups([])
    os.setgid(gid)
    os.setresuid(NOBODY, uid, NOBODY)  # its right to kill, without being anybody it may kill
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if not any(_owner(pid) == uid for pid in _processes() - {os.getpid()}) or time.monotonic() > deadline:
            return
        time.sleep(PAUSE_S)


def _kill_others(spared: set[int], children: Children) -> None:
    """Stop everything first, so that nothing can fork away from being killed. The agent does it itself, not a child:
    if it is process 1 there is nothing the code can do to it."""
    deadline = time.monotonic() + LIMIT_S
    while (left := _processes() - spared) and time.monotonic() < deadline:
        stopped: set[int] = set()
        for _ in range(MAX_PASSES):
            new = _processes() - spared - stopped
            if not new:
                break
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(left | stopped, signal.SIGKILL)
        children.reap()
        time.sleep(PAUSE_S)


def _processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:  # gone
        return -1


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
