"""What a process can change about itself with `prctl`, which Python does not offer.

Errors are ignored, except where a docstring says so: in a machine whose agent has few privileges, some of these calls
are not allowed.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CAPABILITIES = 64  # possible numbers; most are unused
INSTRUCTION_BYTES = 8  # of a filter

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """A filter: `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _prctl(option: int, value: int, address: object = None) -> bool:
    zero = ctypes.c_ulong(0)
    return bool(_libc.prctl(option, ctypes.c_ulong(value), address or zero, zero, zero) == 0)


def become_subreaper() -> None:
    """Adopt orphaned descendants, as process 1 would. Survives an exec, is not inherited by children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_no_new_privs() -> None:
    """Ignore setuid bits and file capabilities in every later exec, also of children."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_bounding_set() -> None:
    """Make it impossible to regain any capability, even as root."""
    for capability in range(CAPABILITIES):
        _prctl(PR_CAPBSET_DROP, capability)


def set_dumpable(*, dumpable: bool) -> None:
    """Allow or forbid other processes of the same user to read and write this one's memory."""
    _prctl(PR_SET_DUMPABLE, int(dumpable))


def die_with_parent() -> None:
    """Be killed when the parent ends, however it does."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_seccomp_filter(program: bytes) -> None:
    """Filter the system calls of this thread, and of everything it starts, with a BPF program.

    Raises:
        OSError: the kernel has no such filters, or refuses this one.
    """
    filter_ = _Program(len(program) // INSTRUCTION_BYTES, program)
    if not _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_)):
        number = ctypes.get_errno()
        raise OSError(number, f"no seccomp filter can be installed: {os.strerror(number)}")
