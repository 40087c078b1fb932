"""The unprivileged user whose code a machine runs: its privileges, its limits, its directories."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH103, PTH118, PTH123

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from guest.places import BUILD, CACHE, CONFIG, OUTPUTS, SETTINGS, WORKSPACE
from guest.prctl import drop_bounding_set, set_dumpable, set_no_new_privs
from guest.processes import set_soft_limits

CODE_NICENESS = 15  # where agent and code are one user: the agent must respond among many busy processes
CODE_OOM_SCORE = 500  # if memory runs out, the kernel kills code before the agent
WATCHERS_MB = 32  # of a machine's memory, for the agent and the kernel that watches a program
# Addresses that a Python kernel may have besides its memory, so that one absurd allocation gets a MemoryError. Only
# what is used counts otherwise: threads and libraries reserve far more. 160 threads with their stacks and arenas of the
# C library take 22 GB of addresses for a moment, a WebAssembly engine 10 GB.
RESERVED_MB = 32 * 1024
MIB = 1024 * 1024
MAX_PROCESSES = 160  # and threads, of the sandbox's user; a fork costs 1.4 MB, a small machine has 350 MB to spare
# In gVisor a fork of the smallest Python process costs 3 MB, and up to 1 MB of gVisor's own memory: so many fit into a
# machine, even if its agent, among them, gets no CPU to count them.
FORK_MB = 4


class User:
    """Whose privileges code and file requests have. Without ids: those of the agent itself."""

    def __init__(
        self,
        uid: int | None,
        gid: int | None,
        own_pids: bool = False,
        memory_mb: int = 0,
        own_kernel: bool = False,
    ) -> None:
        self.uid, self.gid = uid, gid
        self.own_pids = own_pids  # all visible processes belong to this machine
        self.memory_mb = memory_mb  # of all processes together with their files; 0: no limit. A refresh may change it
        self.own_kernel = own_kernel  # /proc/meminfo is about this machine alone

    def as_code(self) -> "User":
        """Return the user as a process sees it that has dropped its privileges already."""
        return User(None, None, own_pids=True, memory_mb=self.memory_mb, own_kernel=self.own_kernel)

    def fields(self) -> list[int | None]:
        """Return the arguments that make the same user, for JSON."""
        return [self.uid, self.gid, self.own_pids, self.memory_mb, self.own_kernel]

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

    def soft_limits(self, *, addresses: bool = False) -> dict[int, int]:
        """Return the limits of a process that runs code, by their kinds, with one on `addresses` if wanted.

        RLIMIT_RSS is only a note for the kernel that watches memory use: Linux does not enforce it. Addresses are not
        limited where any program may run: sanitizers, Go and others reserve terabytes and use little.
        """
        limits = {}
        if self.has_process_limit:
            limits[resource.RLIMIT_NPROC] = self.max_processes
        if self.memory_mb:
            limits[resource.RLIMIT_RSS] = (self.memory_mb - WATCHERS_MB) * MIB
        if self.memory_mb and addresses:
            limits[resource.RLIMIT_AS] = (self.memory_mb + RESERVED_MB) * MIB
        return limits

    def drop_privileges(self, *, oom_score: int = CODE_OOM_SCORE, addresses: bool = False) -> None:
        """Turn this child of the agent into a process that runs code: a new session, no privileges, limits."""
        os.setsid()
        if self.shares_id:
            set_dumpable(dumpable=True)  # code may debug itself, and the next file is its own only then
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(oom_score))
        with suppress(OSError):  # the agent's own priority is higher
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        if self.has_process_limit:
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            most = MAX_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, MAX_PROCESSES)
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        set_soft_limits(self.soft_limits(addresses=addresses))
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


def parse_user(name: str, *, own_pids: bool = False, memory_mb: int = 0, own_kernel: bool = False) -> User:
    """Parse `UID:GID`, or `none` for the agent's own."""
    if name == "none":
        return User(None, None, own_pids, memory_mb, own_kernel)
    uid, _, gid = name.partition(":")
    return User(int(uid), int(gid), own_pids, memory_mb, own_kernel)
