"""The bubblewrap command line of a machine, as a function of what the machine is."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vmm import seccomp
from vmm.agent import ENVIRONMENT, PYTHON
from vmm.types import MachineSpec

PROGRAM = "bwrap"
READY = b"!"
USER = "1000"  # inside; outside it is whoever started the machine
MIB = 1024 * 1024
SMALL_MB = {"/var/tmp": 64, "/run": 16, "/dev/shm": 64}  # noqa: S108 - the machine's own
OPEN_TO_ALL = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the same
EMPTY = ("--size", "4096", "--perms", "0555")

# What of /proc, besides the processes, programs look at. All else tells about the host, its kernel and its devices.
PROC = Path("/proc")
PROC_KEPT = """
    cgroups cpuinfo filesystems loadavg meminfo mounts net self stat swaps sys sysvipc thread-self uptime version vmstat
"""
# Where the C library looks for the number of CPUs.
CPU_FILES = ("/sys/devices/system/cpu/online", "/sys/devices/system/cpu/possible")


@dataclass(frozen=True, slots=True)
class Box:
    """What a machine has."""

    hostname: str
    root: tuple[str, ...]  # the options that make its root file system
    scratch_mb: Mapping[str, int]  # where it can write, and how much: it is all memory
    vcpus: int


@dataclass(frozen=True, slots=True)
class Command:
    """What to start, and the open files it reads first."""

    argv: list[str]
    files: tuple[int, ...]


def machine_box(spec: MachineSpec, place: str) -> Box:
    """A machine whose tree is at `place`."""
    return Box(spec.id, ("--ro-bind", place, "/"), scratch_mb(spec.disk_mb), spec.vcpus)


def probe_box(usr: str) -> Box:
    """Enough of this host's own programs, with /usr at `usr`, to try something before there is any template."""
    links = [option for name in ("/bin", "/lib", "/lib64") for option in ("--ro-bind-try", name, name)]
    return Box("probe", ("--tmpfs", "/", "--ro-bind", usr, "/usr", *links), dict.fromkeys(scratch_mb(1), 1), 1)


def scratch_mb(disk_mb: int) -> dict[str, int]:
    """Room for what a machine writes."""
    return {"/workspace": disk_mb, "/tmp": max(1, disk_mb // 2), **SMALL_MB}  # noqa: S108 - the machine's own


@contextmanager
def prepared(binary: str, box: Box, program: Sequence[str]) -> Iterator[Command]:
    """The command that runs `program` in a box; its files are open until the block ends.

    Its options are in a file, because a machine can read the command line of its first process.
    """
    with ExitStack() as stack:
        filters = [_file(stack, bytecode) for bytecode in seccomp.programs()]
        cpus = [_file(stack, f"0-{box.vcpus - 1}\n".encode()) for _ in CPU_FILES]
        options = _file(stack, "\0".join(_options(box, filters, cpus)).encode())
        argv = [binary, "--args", str(options), "--", *program]
        yield Command(argv, (*filters, *cpus, options))


def started(limits: Mapping[int, int], program: Sequence[str]) -> list[str]:
    """`program`, under limits on each of its processes, after a byte on its output that says that all is well so far.

    The limits are set inside the machine, because the kernel counts processes by user namespace.
    """
    each = f"for kind, most in {sorted(limits.items())}: resource.setrlimit(kind, (most, most))"
    start = f"import os, resource, sys\n{each}\nos.write(1, {READY!r})\nos.execv(sys.argv[1], sys.argv[1:])"
    return [PYTHON, "-I", "-S", "-c", start, *program]


def _file(stack: ExitStack, content: bytes) -> int:
    """A file of its own for each reader: bubblewrap reads from where the file is."""
    file = os.memfd_create("bubblewrap", os.MFD_CLOEXEC)
    stack.callback(os.close, file)
    os.pwrite(file, content, 0)
    return file


def _options(box: Box, filters: Sequence[int], cpus: Sequence[int]) -> list[str]:
    """What a machine sees and may do. The order matters: what comes later lies on top."""
    return [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        # The agent is the machine's first process, which nothing else in it can end.
        *("--die-with-parent", "--new-session", "--as-pid-1"),
        *("--uid", USER, "--gid", USER, "--hostname", box.hostname, "--chdir", "/"),
        *("--clearenv", *(word for pair in ENVIRONMENT.items() for word in ("--setenv", *pair))),
        *box.root,
        *("--proc", "/proc", *_masks()),
        *("--dev", "/dev"),
        *(option for place, size_mb in box.scratch_mb.items() for option in _scratch(place, size_mb)),
        *("--remount-ro", "/dev"),  # a file system of bubblewrap's own, which would take any amount of data
        *_cpus(cpus),
        *(option for file in filters for option in ("--add-seccomp-fd", str(file))),
    ]


def _scratch(place: str, size_mb: int) -> list[str]:
    mode = "1777" if place in OPEN_TO_ALL else "0755"
    return ["--size", str(size_mb * MIB), "--perms", mode, "--tmpfs", place]


def _masks() -> list[str]:
    masks: list[str] = []
    kept = PROC_KEPT.split()
    for entry in sorted(PROC.iterdir()):
        if entry.name.isdigit() or entry.name in kept:
            continue
        if entry.is_symlink():  # to another place in /proc or /sys, which is not there or masked too
            continue
        if entry.is_dir():
            masks += [*EMPTY, "--tmpfs", str(entry), "--remount-ro", str(entry)]
        else:
            masks += ["--ro-bind", "/dev/null", str(entry)]  # a device where none may be opened: nobody can read it
    return masks


def _cpus(files: Sequence[int]) -> list[str]:
    """A /sys with nothing in it but how many CPUs there are."""
    written = [word for file, path in zip(files, CPU_FILES, strict=True) for word in ("--file", str(file), path)]
    return ["--size", "65536", "--tmpfs", "/sys", *written, "--remount-ro", "/sys"]
