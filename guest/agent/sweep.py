"""Ends processes that code has left running, and waits until they are gone."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH116, PTH208

import os
import signal
from collections.abc import Callable
from functools import partial

from guest.agent.children import Children
from guest.agent.user import User
from guest.processes import end_all, process_count, process_table, signal_everything, tree_of

NOBODY = 65534
SWEEP_S = 5.0  # for killed processes to be reaped; they count against the user's limit until then


def sweep(user: User, children: Children, keep: set[int]) -> None:
    """Kill all processes of the user, but not those in `keep`, the process groups they lead, and their descendants."""
    if user.has_process_limit:
        end_all(partial(_find_others, user, keep), children.reap, SWEEP_S, broadcast_to(user))


def make_room(user: User, children: Children, keep: set[int]) -> bool:
    """Sweep if most processes of a full machine are not those that a sweep keeps; returns whether it did."""
    broadcast = broadcast_to(user)
    most = user.max_processes * 9 // 10  # with more a program can hardly start another
    if broadcast is None or process_count() < most:
        return False
    broadcast(signal.SIGSTOP)
    full = len(_find_others(user, keep)) > most // 2 and len(owned_by(user)) >= most
    broadcast(signal.SIGCONT)
    if full:
        sweep(user, children, keep)
    return full


def _find_others(user: User, keep: set[int]) -> set[int]:
    table = process_table()
    members = {pid for pid, process in table.items() if process.group in keep}
    return owned_by(user) - {1, os.getpid()} - tree_of(keep | members, table)


def owned_by(user: User) -> set[int]:
    """Return the processes of the user; all visible ones if it is the agent's own."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    return pids if user.uid is None else {pid for pid in pids if _owner(pid) == user.uid}


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:  # gone
        return -1


def broadcast_to(user: User) -> Callable[[int], None] | None:
    """Return a function that signals all processes of the user at once, if that is safe: see `User.own_pids`."""
    if user.uid is not None:
        return partial(_signal_user, user.uid)
    return signal_everything if user.own_pids else None


def _signal_user(uid: int, number: int) -> None:
    os.setresuid(NOBODY, uid, 0)  # may signal the user's processes and no others, and cannot be signalled by them
    try:
        signal_everything(number)
    finally:
        os.setresuid(0, 0, 0)
