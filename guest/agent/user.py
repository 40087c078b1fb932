"""The unprivileged user whose code a machine runs: its privileges, its limits, its directories."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103, PTH118, PTH123

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from guest.places import BUILD, CACHE, CONFIG, OUTPUTS, SETTINGS, WORKSPACE
from guest.prctl import drop_bounding_set, set_dumpable, set_no_new_privs

CODE_NICENESS = 15  # where agent and code are one user: the agent must respond among many busy processes
CODE_OOM_SCORE = 500  # if memory runs out, the kernel kills code before the agent
WATCHERS_MB = 32  # of a machine's memory, for the agent and the kernel that watches a program
MAX_PROCESSES = 160  # and threads, of the sandbox's user; a fork costs 1.4 MB, a small machine has 350 MB to spare
# In gVisor a fork of the smallest Python process costs 3 MB, and up to 1 MB of gVisor's own memory: so many fit into a
# machine, even if its agent, among them, gets no CPU to count them.
FORK_MB = 4


class User(NamedTuple):
    """Whose privileges code and file requests have. Without ids: those of the agent itself."""

    uid: int | None
    gid: int | None
    own_pids: bool = False  # all visible processes belong to this machine
    memory_mb: int = 0  # limit of each process, and of all together with their files; 0: none
    own_kernel: bool = False  # /proc/meminfo is about this machine alone

    @property
    def shares_id(self) -> bool:
        """Whether code and agent are one user, alone in a PID namespace."""
        return self.uid is None and self.own_pids

    @property
    def has_process_limit(self) -> bool:
        """Whether the number of processes is limited. Elsewhere the limit would count all of the host's user."""
        return self.uid is not None or self.own_pids

    @property
    def max_processes(self) -> int:
        """The limit of that number."""
        return min(MAX_PROCESSES, self.memory_mb // FORK_MB) if self.own_kernel and self.memory_mb else MAX_PROCESSES

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Act with this user's privileges in the block. The agent has one thread, so nothing else is affected."""
        if self.uid is None or self.gid is None:
            yield
            return
        try:
            os.setegid(self.gid)
            os.seteuid(self.uid)
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)

    def drop_privileges(self, *, oom_score: int = CODE_OOM_SCORE, memory_watched: bool = False) -> None:
        """Turn this child of the agent into a process that runs code: a new session, no privileges, limits.

        If `memory_watched`, the memory limit is only recorded (as RLIMIT_RSS, which Linux does not enforce) for the
        kernel that watches memory use. A limit on address space would break Go programs and sanitizers, which reserve
        terabytes and use little.
        """
        os.setsid()
        if self.shares_id:
            set_dumpable(dumpable=True)  # code may debug itself, and the next file is its own only then
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(oom_score))
        with suppress(OSError):  # the agent's own priority is higher
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        if self.has_process_limit:
            _limit(resource.RLIMIT_NPROC, self.max_processes)
        if self.memory_mb and memory_watched:
            _limit(resource.RLIMIT_RSS, (self.memory_mb - WATCHERS_MB) * 1024 * 1024)
        elif self.memory_mb:
            _limit_memory(self.memory_mb * 1024 * 1024)
        self.drop_ids()
        if self.shares_id:
            with suppress(OSError):  # the agent cannot raise its own priority here, so code lowers its own
                os.setpriority(os.PRIO_PROCESS, 0, CODE_NICENESS)

    def drop_ids(self) -> None:
        """Become this user for good, without a way to gain privileges."""
        set_no_new_privs()
        drop_bounding_set()
        if self.uid is not None and self.gid is not None:
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)

    def make_places(self) -> None:
        """Create the user's directories and give the user everything in them."""
        for place in (WORKSPACE, OUTPUTS, CONFIG, CACHE, SETTINGS, BUILD):
            os.makedirs(place, exist_ok=True)
            if self.uid is None or self.gid is None:
                continue
            os.chown(place, self.uid, self.gid)
            for folder, names, files in os.walk(place):
                for name in (*names, *files):
                    with suppress(OSError):
                        os.lchown(os.path.join(folder, name), self.uid, self.gid)


def _limit(kind: int, value: int) -> None:
    """Set a limit that cannot be raised again."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _limit_memory(size: int) -> None:
    """Limit the memory that a process may write to; read-only mappings do not count."""
    _limit(resource.RLIMIT_DATA, size)
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE).close()
    except OSError:
        return
    # The limit was not enforced, as in gVisor, which counts almost nothing as data: limit the address space instead.
    with open("/proc/self/status") as file:
        kilobytes = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in file) if "Vm" in name}
    read_only = (int(kilobytes["VmSize"]) - int(kilobytes["VmData"])) * 1024
    _limit(resource.RLIMIT_AS, size + read_only)


def parse_user(name: str, *, own_pids: bool = False, memory_mb: int = 0, own_kernel: bool = False) -> User:
    """Parse `UID:GID`, or `none` for the agent's own."""
    if name == "none":
        return User(None, None, own_pids, memory_mb, own_kernel)
    uid, _, gid = name.partition(":")
    return User(int(uid), int(gid), own_pids, memory_mb, own_kernel)
