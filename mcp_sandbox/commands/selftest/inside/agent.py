"""The agent of the machine and all other processes with more privileges than code."""

import ctypes
import os
import signal

from .attempts import Attempts, libc, open_and_close, pids, read_text

STATE = ("mem", "syscall", "stack", "task/{pid}/mem")
LINKS = ("root", "cwd", "exe")
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
AGENT_FILES = "/run/mcp-sandbox"
DESCRIPTORS = 64


def guardians() -> list[int]:
    """Return the agent, the first process and everything else that belongs to root."""
    found = [pid for pid in pids() if pid == 1 or (_owner(pid) == 0 and _command(pid) != [""])]
    if not any("guest.agent" in _command(pid) for pid in found):
        raise RuntimeError("the agent is not in sight")
    return found


def signal_it() -> Attempts:
    """Try to end the agent."""
    found = Attempts()
    for pid in guardians():
        found.action(f"kill {pid}", os.kill, pid, signal.SIGKILL)
    return found


def read_memory() -> Attempts:
    """Try to read the agent's memory and state."""
    found = Attempts()
    for pid in guardians():
        for name in STATE:
            found.action(f"process {pid}: {name}", _read, f"/proc/{pid}/{name}".format(pid=pid))
        for name in LINKS:
            found.action(f"process {pid}: {name}", os.readlink, f"/proc/{pid}/{name}")
    return found


def see_state() -> Attempts:
    """Try to learn where the agent's memory is, its environment and what it has open."""
    found = Attempts()
    for pid in guardians():
        for name in ("environ", "maps"):
            found.action(f"process {pid}: {name}", _read, f"/proc/{pid}/{name}")
        found.action(f"process {pid}: descriptors", os.listdir, f"/proc/{pid}/fd")
    return found


def trace_it() -> Attempts:
    """Try to attach to the agent as a debugger does, and to copy its memory."""
    found = Attempts()

    class Part(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    buffer = ctypes.create_string_buffer(8)
    here = ctypes.byref(Part(ctypes.cast(buffer, ctypes.c_void_p), 8))
    for pid in guardians():
        for name, how in (("attach", PTRACE_ATTACH), ("seize", PTRACE_SEIZE)):
            found.note(f"process {pid}: {name}", succeeded=libc.ptrace(how, pid, None, None) != -1)
        found.note(f"process {pid}: copy", succeeded=libc.process_vm_readv(pid, here, 1, here, 1, 0) != -1)
    return found


def open_channel() -> Attempts:
    """Try to open what the agent has open.

    In gVisor code can open the pipes of its own output, which belong to it, and files that have a path.
    """
    found = Attempts()
    for pid in guardians():
        for number in range(DESCRIPTORS):
            for way in (os.O_RDONLY, os.O_WRONLY):
                what = f"process {pid}: descriptor {number}"
                found.note(what, succeeded=_opens(f"/proc/{pid}/fd/{number}", way))
    return found


def change_files() -> Attempts:
    """Try to change the agent's code and its notes about the machine."""
    found = Attempts()
    for name in ("guest/agent/__main__.py", "new", "hostname", "machine-id", "pid1"):
        path = f"{AGENT_FILES}/{name}"
        found.action(path, open_and_close, path, os.O_WRONLY | os.O_CREAT)
    return found


def _opens(path: str, way: int) -> bool:
    try:
        file = os.open(path, way | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        ours = os.fstat(file).st_uid == os.getuid()
        return not ours and not os.readlink(f"/proc/self/fd/{file}").startswith("/")
    finally:
        os.close(file)


def _command(pid: int) -> list[str]:
    return read_text(f"/proc/{pid}/cmdline").split("\0")


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(10)
