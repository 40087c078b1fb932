"""The unprivileged user whose code a machine runs: its rights, its limits, its places."""

# pathlib costs imports and instructions that an emulated CPU feels
# ruff: noqa: PTH103, PTH118, PTH123, PTH208

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from guest.agent.rights import drop_capability_bounds, gain_nothing_by_exec, show_memory
from guest.places import BUILD, CACHE, CONFIG, OUTPUTS, SETTINGS, WORKSPACE

CODE_NICENESS = 15  # where agent and code are one user: the agent has to be heard among many busy processes
CODE_OOM_SCORE = 500  # when memory runs out the code goes, not the agent
MAX_PROCESSES = 160  # and threads, of the sandbox's user; a fork costs 1.4 MB, a small machine has 350 MB to spare


class User(NamedTuple):
    """Whose rights code and file requests have. No ids: those of the agent itself."""

    uid: int | None
    gid: int | None
    own_pids: bool = False  # all processes in sight belong to this machine, whoever's they are
    memory_mb: int = 0  # that a process may write to; 0: as much as there is

    @property
    def shares_id(self) -> bool:
        """Code and agent are one user, in a machine of their own."""
        return self.uid is None and self.own_pids

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Do something with this user's rights; the agent has one thread, so nothing else happens meanwhile."""
        if self.uid is None or self.gid is None:
            yield
            return
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)

    def let_loose(self, *, oom_score: int = CODE_OOM_SCORE, watched: bool = False) -> None:
        """In a child of the agent: be a process that runs code, below the agent in every way, and nothing else."""
        os.setsid()
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(oom_score))
        with suppress(OSError):  # the agent is above all that code can start
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self.become(watched=watched)

    def become(self, *, watched: bool = False) -> None:
        """Give up all other rights, for good, and take on the limits of code.

        Where memory is watched, its limit is only written down: the system knows none for memory in use, and one for
        memory in sight would end Go programs and sanitizers, which reserve terabytes and use little.
        """
        if self.uid is not None or self.own_pids:  # else the limit would count all that this host's user runs
            _limit(resource.RLIMIT_NPROC, MAX_PROCESSES)
        if self.memory_mb and watched:
            _limit(resource.RLIMIT_RSS, self.memory_mb * 1024 * 1024)
        elif self.memory_mb:
            _limit_memory(self.memory_mb * 1024 * 1024)
        gain_nothing_by_exec()
        drop_capability_bounds()
        if self.uid is not None and self.gid is not None:
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)
        elif self.own_pids:
            show_memory(shown=True)  # code may look at itself
            with suppress(OSError):  # the agent may not raise its own priority here, so code lowers its own
                os.setpriority(os.PRIO_PROCESS, 0, CODE_NICENESS)

    def memory(self) -> tuple[int, int]:
        """Bytes the machine has, and those that are not in use. Where it has no memory of its own, what it may take."""
        if self.memory_mb:
            total = self.memory_mb * 1024 * 1024
            return total, max(0, total - _resident_bytes())
        with open("/proc/meminfo") as file:
            known = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in file)}
        return known["MemTotal"], known["MemAvailable"]

    def make_places(self) -> None:
        """Create the user's directories and make everything in them theirs."""
        for place in (WORKSPACE, OUTPUTS, CONFIG, CACHE, SETTINGS, BUILD):
            os.makedirs(place, exist_ok=True)
            if self.uid is None or self.gid is None:
                continue
            os.chown(place, self.uid, self.gid)
            for folder, names, files in os.walk(place):
                for name in (*names, *files):
                    with suppress(OSError):
                        os.lchown(os.path.join(folder, name), self.uid, self.gid)


def _resident_bytes() -> int:
    """Memory of all processes in sight."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/statm") as file:
                pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def _limit(kind: int, value: int) -> None:
    """Set a limit that cannot be raised again."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _limit_memory(size: int) -> None:
    """Limit what a process may write to; what it only reads, or has reserved, does not count."""
    _limit(resource.RLIMIT_DATA, size)
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE).close()
    except OSError:
        return
    # That was too much, with what is in use already: a system (gVisor) that counts next to nothing as data.
    with open("/proc/self/status") as file:
        kilobytes = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in file) if "Vm" in name}
    read_only = (int(kilobytes["VmSize"]) - int(kilobytes["VmData"])) * 1024
    _limit(resource.RLIMIT_AS, size + read_only)


def parse_user(name: str, *, own_pids: bool = False, memory_mb: int = 0) -> User:
    """`UID:GID`, or `none` for the agent's own."""
    if name == "none":
        return User(None, None, own_pids, memory_mb)
    uid, _, gid = name.partition(":")
    return User(int(uid), int(gid), own_pids, memory_mb)
