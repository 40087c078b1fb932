"""The bubblewrap command line of a machine, computed from its spec."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vmm import seccomp
from vmm.agent import ENVIRONMENT, PYTHON
from vmm.process import ANNOUNCE
from vmm.scratch import mode_of, scratch_mb
from vmm.types import MachineSpec, NetworkMode

PROGRAM = "bwrap"
READY = b"!"
USER = "1000"  # inside the machine; outside it is the user who runs bubblewrap
MIB = 1024 * 1024
PROBE_SCRATCH_MB = {"/workspace": 1, "/tmp": 1}  # noqa: S108 - the machine's own
EMPTY = ("--size", "4096", "--perms", "0555")

# Entries of /proc that programs need besides processes. The others reveal the host, its kernel and its devices.
PROC = Path("/proc")
PROC_KEPT = """
    cgroups cpuinfo filesystems loadavg meminfo mounts net self stat swaps sys sysvipc thread-self uptime version vmstat
"""
# From these the C library reads the number of CPUs.
CPU_FILES = ("/sys/devices/system/cpu/online", "/sys/devices/system/cpu/possible")


@dataclass(frozen=True, slots=True)
class Box:
    """What bubblewrap sets up for a machine."""

    hostname: str
    root: tuple[str, ...]  # the options that mount its root file system
    scratch_mb: Mapping[str, int]  # the size of each tmpfs that it can write to
    vcpus: int
    memory_mb: int
    network: NetworkMode = NetworkMode.NONE

    def files(self) -> dict[str, str]:
        """Return what the machine reads of its size, by path, instead of the host's."""
        cpus = PROC.joinpath("cpuinfo").read_text().split("\n\n")[: self.vcpus]
        kilobytes = self.memory_mb * 1024
        memory = "".join(f"{name + ':':15} {kilobytes:>9} kB\n" for name in ("MemTotal", "MemFree", "MemAvailable"))
        swap = "".join(f"{name + ':':15} {0:>9} kB\n" for name in ("Buffers", "Cached", "SwapTotal", "SwapFree"))
        numbers = f"0-{self.vcpus - 1}\n"
        return {
            "/proc/cpuinfo": "\n\n".join((*cpus, "")),
            "/proc/meminfo": memory + swap,
            **dict.fromkeys(CPU_FILES, numbers),
        }


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the files that it inherits."""

    argv: list[str]
    files: tuple[int, ...]


def machine_box(spec: MachineSpec, place: str) -> Box:
    """Return the box of a machine whose tree is at `place`."""
    return Box(spec.id, ("--ro-bind", place, "/"), scratch_mb(spec), spec.vcpus, spec.memory_mb, spec.network)


def probe_box(usr: str) -> Box:
    """Return a box with the host's own programs, for a probe that has no template. `usr` is where /usr is."""
    links = [option for name in ("/bin", "/lib", "/lib64") for option in ("--ro-bind-try", name, name)]
    return Box("probe", ("--tmpfs", "/", "--ro-bind", usr, "/usr", *links), PROBE_SCRATCH_MB, 1, 1)


@contextmanager
def prepared(binary: str, box: Box, program: Sequence[str]) -> Iterator[Command]:
    """Yield the command that runs `program` in a box; its files are open until the block ends.

    The options are in a file because a machine can read the command line of its first process.
    """
    with ExitStack() as stack:
        filters = [_file(stack, bytecode) for bytecode in seccomp.filters()]
        texts = {path: _file(stack, text.encode()) for path, text in box.files().items()}
        options = _file(stack, "\0".join(_options(box, filters, texts)).encode())
        argv = [binary, "--args", str(options), "--", *program]
        if box.network is NetworkMode.NAT:  # its network namespace has to get a device first
            argv = ["sh", "-c", f'{ANNOUNCE} && exec "$@"', "sh", *argv]
        yield Command(argv, (*filters, *texts.values(), options))


def started(limits: Mapping[int, int], cpus: Sequence[int], program: Sequence[str]) -> list[str]:
    """Return a command that sets limits on each process and its CPUs, writes READY, and becomes `program`.

    The limits are set inside the machine because the kernel counts processes by user namespace. The cgroup limits CPU
    time; libraries start as many threads as they see CPUs, so a machine runs on as many as it may use.
    """
    each = f"for kind, most in {sorted(limits.items())}: resource.setrlimit(kind, (most, most))"
    start = f"import os, resource, sys\n{each}\nos.sched_setaffinity(0, {list(cpus)})\nos.write(1, {READY!r})\n"
    start += "os.execv(sys.argv[1], sys.argv[1:])"
    return [PYTHON, "-I", "-S", "-c", start, *program]


def _file(stack: ExitStack, content: bytes) -> int:
    """Return a new file with `content`. Each reader needs its own: bubblewrap reads from the current position."""
    file = os.memfd_create("bubblewrap", os.MFD_CLOEXEC)
    stack.callback(os.close, file)
    os.pwrite(file, content, 0)
    return file


def _options(box: Box, filters: Sequence[int], texts: Mapping[str, int]) -> list[str]:
    """Return the options of a machine. Order matters: later mounts cover earlier ones."""
    return [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        *(["--share-net"] if box.network is NetworkMode.NAT else []),
        # The agent is process 1, which no other process of the machine can kill.
        *("--die-with-parent", "--new-session", "--as-pid-1"),
        *("--uid", USER, "--gid", USER, "--hostname", box.hostname, "--chdir", "/"),
        *("--clearenv", *(word for pair in ENVIRONMENT.items() for word in ("--setenv", *pair))),
        *box.root,
        *("--proc", "/proc", *_masks()),
        # The kernel's settings of its own namespaces belong to the machine's user, who could change them.
        *("--ro-bind", "/proc/sys", "/proc/sys"),
        *("--dev", "/dev"),
        *(option for place, size_mb in box.scratch_mb.items() for option in _scratch(place, size_mb)),
        *("--remount-ro", "/dev"),  # bubblewrap's own tmpfs, which has no size limit
        *_texts(texts),
        *(option for file in filters for option in ("--add-seccomp-fd", str(file))),
    ]


def _scratch(place: str, size_mb: int) -> list[str]:
    return ["--size", str(size_mb * MIB), "--perms", mode_of(place), "--tmpfs", place]


def _masks() -> list[str]:
    masks: list[str] = []
    kept = PROC_KEPT.split()
    for entry in sorted(PROC.iterdir()):
        if entry.name.isdigit() or entry.name in kept:
            continue
        if entry.is_symlink():  # its target in /proc or /sys is missing or masked as well
            continue
        if entry.is_dir():
            masks += [*EMPTY, "--tmpfs", str(entry), "--remount-ro", str(entry)]
        else:
            masks += ["--ro-bind", "/dev/null", str(entry)]  # the mount allows no devices, so opening it fails
    return masks


def _texts(files: Mapping[str, int]) -> list[str]:
    """Return the options for files of /proc and a /sys that has only the number of CPUs."""
    options = ["--size", "65536", "--tmpfs", "/sys"]
    for path, file in files.items():
        options += ["--ro-bind-data" if Path(path).is_relative_to(PROC) else "--file", str(file), path]
    return [*options, "--remount-ro", "/sys"]
