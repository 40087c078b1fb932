"""What a process may give up or take on with `prctl`, for which Python has no function of its own.

Each is asked for where it may be refused: a machine that lends its agent few rights has less to give up.
"""

import ctypes

PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CAPABILITIES = 64  # numbers there can be; most are not in use

_libc = ctypes.CDLL(None)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero)


def take_in_orphans() -> None:
    """From now on processes below this one that lose their parent become its children, as if it were process 1."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def gain_nothing_by_exec() -> None:
    """No program that this process or its children start gives them rights, whatever its mode says."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capability_bounds() -> None:
    """Leave no capability to be had again, not even by becoming root."""
    for capability in range(CAPABILITIES):
        _prctl(PR_CAPBSET_DROP, capability)


def show_memory(*, shown: bool) -> None:
    """Whether other processes of the same user may read and write this one's memory."""
    _prctl(PR_SET_DUMPABLE, int(shown))
