"""What a process can change about itself with `prctl`, which Python does not offer.

Errors are ignored: in a machine whose agent has few privileges, some of these calls are not allowed.
"""

import ctypes

PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CAPABILITIES = 64  # possible numbers; most are unused

_libc = ctypes.CDLL(None)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero)


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
