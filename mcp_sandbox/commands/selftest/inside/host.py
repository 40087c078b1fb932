"""What there is to see of the host, and what of the machine can be changed."""

import glob
import os
import platform
import re
import socket
import subprocess
import sys

from .attempts import Attempts, open_and_close, pids, read_text

# In every machine; gVisor's fuse and tun are its own and have no effect outside.
HARMLESS_DEVICES = (
    *("full", "null", "random", "urandom", "zero", "tty", "ptmx", "pts/ptmx", "stdin", "stdout", "stderr"),
    *("fuse", "net/tun"),
)
NO_DEVICES = ("/dev/fd/", "/dev/pts/", "/dev/shm/")  # noqa: S108 - files and terminals of this user
KERNEL_FILES = ("/proc/kcore", "/proc/kmsg", "/proc/sysrq-trigger", "/dev/kvm", "/dev/vhost-vsock")
NAMES = (
    *("/etc/hostname", "/etc/machine-id", "/etc/hosts", "/proc/sys/kernel/hostname", "/proc/cmdline"),
    *("/proc/self/cgroup", "/proc/self/mountinfo"),
)
OF_THE_MACHINE = (
    *("/etc/passwd", "/etc/hosts", "/etc/ld.so.preload", "/usr/bin/python3", "/new", "/root/new", "/dev/new"),
    *("/proc/sysrq-trigger", "/sys/power/state", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/release_agent"),
    *("/dev/vda", "/dev/vdb", "/dev/mem", "/dev/kmsg", "/dev/hwrng", "/dev/vport0p1"),
)
OWN_SETTINGS = "/proc/sys"


def see_processes(command_line: str) -> Attempts:
    """Look for the process on the host that runs the self-test."""
    found = Attempts()
    for pid in pids():
        shown = read_text(f"/proc/{pid}/cmdline")
        if shown:
            found.note(f"process {pid}", succeeded=shown == command_line)
    return found


def see_environment(secret: str) -> Attempts:
    """Look for a variable of the server in the environments of all processes in sight."""
    found = Attempts()
    environments = {f"process {pid}": read_text(f"/proc/{pid}/environ") for pid in pids()}
    environments["own"] = repr(dict(os.environ))
    show = [sys.executable, "-c", "import os; print(dict(os.environ))"]
    environments["a new program's"] = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    for whose, environment in environments.items():
        if environment:
            found.note(f"environment: {whose}", succeeded=secret in environment)
    return found


def see_files(paths: list[str]) -> Attempts:
    """Look for files that are on the host."""
    found = Attempts()
    for path in paths:
        found.note(path, succeeded=os.path.exists(path))
    return found


def learn_names(names: list[str]) -> Attempts:
    """Look for the names of the host in all places that tell a machine's own."""
    found = Attempts()
    told = [socket.gethostname(), *platform.uname()]
    places = [*NAMES, *glob.glob("/sys/class/dmi/id/*"), *glob.glob("/sys/devices/virtual/dmi/id/*")]
    told += [read_text(place) for place in places]
    words = {word for text in told for word in (text.strip(), *re.findall(r"[\w.-]+", text))}
    for name in names:
        found.note(name, succeeded=name in words)
    return found


def open_devices() -> Attempts:
    """Try to open every device, and files that show a kernel's memory."""
    found = Attempts()
    paths = [os.path.join(folder, name) for folder, _, names in os.walk("/dev") for name in names]
    for path in (*paths, *KERNEL_FILES):
        if path.removeprefix("/dev/") in HARMLESS_DEVICES or path.startswith(NO_DEVICES):
            continue
        found.action(path, open_and_close, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return found


def change_files() -> Attempts:
    """Try to write to what belongs to the machine: its system, its devices, its kernel's settings."""
    found = Attempts()
    for path in OF_THE_MACHINE:
        found.action(path, open_and_close, path, os.O_WRONLY | os.O_CREAT)
    settings = [os.path.join(folder, name) for folder, _, names in os.walk(OWN_SETTINGS) for name in names]
    for path in settings:
        found.action(path, _write_back, path)
    return found


def _write_back(path: str) -> None:
    """Write what a file contains. Some settings can be opened by everyone and refuse only the writing."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, read_text(path).encode())
    finally:
        os.close(file)
