"""System calls that code has no business with: they are refused, whatever their arguments are.

All calls are given arguments that would succeed for root or do no harm. The numbers are those of x86-64.
"""

import ctypes
import mmap
import os
import struct
import time

from .attempts import Attempts, in_a_child, open_and_close

AT_FDCWD = -100 & 0xFFFF_FFFF
BPF_MAP_CREATE, BPF_MAP_TYPE_ARRAY = 0, 2
KEY_SPEC_SESSION_KEYRING = -3 & 0xFFFF_FFFF
KEYCTL_GET_KEYRING_ID, KEYCTL_JOIN_SESSION_KEYRING = 0, 1
MNT_DETACH = 2
OPEN_TREE_CLONE = 1
PERF_TYPE_SOFTWARE, PERF_ATTR_SIZE = 1, 128
PERF_EXCLUDE_KERNEL = 1 << 5
REBOOT_MAGIC, REBOOT_MAGIC2, REBOOT_CAD_OFF = 0xFEE1_DEAD, 0x2812_1969, 0
UFFD_USER_MODE_ONLY = 1
SYSLOG_READ_ALL = 3
X32_GETPID = 0x4000_0000 + 39
GETPID_32 = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret


def mount() -> Attempts:
    """Try to change the file systems."""
    found = Attempts()
    found.call("mount", 165, b"none", b"/workspace", b"tmpfs", 0, None)
    found.call("umount2", 166, b"/proc", MNT_DETACH)
    found.call("pivot_root", 155, b"/workspace", b"/workspace")
    found.call("chroot", 161, b"/workspace")
    found.call("open_tree", 428, AT_FDCWD, b"/workspace", OPEN_TREE_CLONE)
    found.call("fsopen", 430, b"tmpfs", 0)
    found.call("mount_setattr", 442, AT_FDCWD, b"/workspace", 0, ctypes.create_string_buffer(32), 32)
    return found


def load_kernel_code() -> Attempts:
    """Try to load a module or another kernel, and to reboot."""
    found = Attempts()
    found.call("init_module", 175, None, 0, b"")
    found.call("finit_module", 313, 0, b"", 0)
    found.call("delete_module", 176, b"none", os.O_NONBLOCK)
    found.call("kexec_load", 246, 0, 0, None, 0)
    found.call("reboot", 169, REBOOT_MAGIC, REBOOT_MAGIC2, REBOOT_CAD_OFF, None)
    return found


def change_the_machine() -> Attempts:
    """Try to set the clock, the host name and swap space, and to reach hardware."""
    found = Attempts()
    found.action("clock_settime", time.clock_settime, time.CLOCK_REALTIME, time.time())
    found.call("settimeofday", 164, struct.pack("2q", int(time.time()), 0), None)
    found.call("sethostname", 170, b"evil", 4)
    found.call("swapon", 167, b"/dev/vdb", 0)
    found.call("swapoff", 168, b"/dev/vdb")
    found.call("acct", 163, b"/workspace/acct")
    found.call("iopl", 172, 3)
    found.call("ioperm", 173, 0, 8, 1)
    return found


def read_kernel_log() -> Attempts:
    """Try to read the kernel's log, which shows addresses and devices."""
    found = Attempts()
    found.call("syslog", 103, SYSLOG_READ_ALL, ctypes.create_string_buffer(100), 100)
    return found


def use_other_architectures() -> Attempts:
    """Try to make calls as x32 and 32-bit programs do: their numbers mean other calls, past a filter."""
    found = Attempts()
    found.call("x32", X32_GETPID)

    def getpid_32() -> int:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(GETPID_32)
        function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        return int(function() == os.getpid())

    found.note("32-bit", succeeded=in_a_child(getpid_32) == 1)
    return found


def open_by_handle() -> Attempts:
    """Try to open a file without a path, past the directories that hide it."""
    found = Attempts()
    handle = ctypes.create_string_buffer(struct.pack("Ii", 8, 1) + bytes(8))
    found.call("open_by_handle_at", 304, AT_FDCWD, handle, os.O_RDONLY)
    return found


def use_io_uring() -> Attempts:
    """Try to make system calls that no seccomp filter sees."""
    found = Attempts()
    found.call("io_uring_setup", 425, 8, ctypes.create_string_buffer(120))
    found.call("io_uring_enter", 426, 0, 0, 0, 0, None, 0)
    found.call("io_uring_register", 427, 0, 0, None, 0)
    return found


def use_bpf_and_counters() -> Attempts:
    """Try to load programs into the kernel, and to watch its performance counters."""
    found = Attempts()
    array = struct.pack("4I", BPF_MAP_TYPE_ARRAY, 4, 4, 1)
    found.call("bpf", 321, BPF_MAP_CREATE, ctypes.create_string_buffer(array + bytes(112)), 128)
    counter = struct.pack("IIQQQQQ", PERF_TYPE_SOFTWARE, PERF_ATTR_SIZE, 0, 0, 0, 0, PERF_EXCLUDE_KERNEL)
    event = ctypes.create_string_buffer(counter.ljust(PERF_ATTR_SIZE, b"\0"))
    found.call("perf_event_open", 298, event, 0, -1 & 0xFFFF_FFFF, -1 & 0xFFFF_FFFF, 0)
    return found


def use_kernel_keys() -> Attempts:
    """Try to use the kernel's key store, which namespaces do not separate."""
    found = Attempts()
    found.call("add_key", 248, b"user", b"selftest", b"x", 1, KEY_SPEC_SESSION_KEYRING)
    found.call("request_key", 249, b"user", b"selftest", None, KEY_SPEC_SESSION_KEYRING)
    found.call("keyctl: get", 250, KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 1)
    found.call("keyctl: join", 250, KEYCTL_JOIN_SESSION_KEYRING, None)
    return found


def use_userfaultfd() -> Attempts:
    """Try to stop the kernel in the middle of a copy, a common step of exploits."""
    found = Attempts()
    found.call("userfaultfd", 323, 0)
    found.call("userfaultfd: user mode only", 323, UFFD_USER_MODE_ONLY)
    found.action("/dev/userfaultfd", open_and_close, "/dev/userfaultfd", os.O_RDWR)
    return found
