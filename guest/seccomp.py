"""The seccomp filter of every process in a machine: no new namespaces, and no rarely needed parts of the kernel.

Code has no capabilities, but a user namespace would give it all of them over new mounts, networks and devices of a
kernel that was written for trusted administrators. The filter is a deny list, because a machine must run any program.
It is installed once, in the agent, before any code runs: all processes inherit it, and no run pays for it.

Calls of another architecture (32-bit x86, x32) kill the process, because their numbers mean other calls. `clone3` has
its flags in memory, where no filter can see them: it does not exist, and C libraries fall back to `clone`.

Standard library only, without libseccomp: templates need not contain it.
"""

import errno
import os
import struct
from collections.abc import Mapping
from typing import NamedTuple

from guest.prctl import set_no_new_privs, set_seccomp_filter

# Offsets in `struct seccomp_data`; both architectures are little-endian.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
# Classic BPF: load a word, jump if equal, if greater or equal, if any bit is set, return.
LOAD, IF_EQUAL, IF_GREATER_EQUAL, IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL_PROCESS, REFUSE, ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
X32 = 0x4000_0000  # the lowest number of an x32 call
LEAF = 4  # calls that are compared one by one, at the end of a binary search
NEW_TIME = 0x80  # for `unshare` only: in `clone` it is part of the exit signal
NEW_NAMESPACE = 0x7E02_0000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class Architecture(NamedTuple):
    """How an architecture's calls are recognised and numbered."""

    token: int  # AUDIT_ARCH_*
    column: int  # of the tables below


ARCHITECTURES = {"x86_64": Architecture(0xC000_003E, 0), "aarch64": Architecture(0xC000_00B7, 1)}

# Numbers on x86-64 and aarch64; -1: it has no such call.
CLONE = (56, 220)
CLONE3 = (435, 435)
UNSHARE = (272, 97)
# What a process could do with the capabilities that a user namespace gives it.
MOUNTS_AND_NAMESPACES: Mapping[str, tuple[int, int]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
}
# Parts of the kernel that ordinary programs do without, and many of whose bugs have given code more privileges.
KERNEL_PARTS: Mapping[str, tuple[int, int]] = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
}
# What a process that only computes has no use for: other computers, and other processes.
NETWORK_AND_PROCESSES: Mapping[str, tuple[int, int]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
}


def confine(*, user_namespaces: bool) -> None:
    """Install the filter in this process, which must have one thread, and in all that it starts from now on.

    Raises:
        OSError: this machine's kernel has no seccomp filters, or the CPU is of an unknown architecture.
    """
    architecture = _architecture()
    _install(program(architecture, user_namespaces=user_namespaces))


def isolate() -> None:
    """Give up the network and all influence on other processes, for this process and all that it starts.

    The caller closes the descriptors that lead elsewhere. Raises OSError as `confine` does.
    """
    architecture = _architecture()
    _install(_assembled(architecture, _refusals(NETWORK_AND_PROCESSES, architecture.column)))


def program(architecture: Architecture, *, user_namespaces: bool) -> bytes:
    """Return the filter as the kernel takes it: an array of `struct sock_filter`."""
    return _assembled(architecture, _rules(architecture.column, user_namespaces=user_namespaces))


def _architecture() -> Architecture:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"there is no seccomp filter for {machine}")
    return ARCHITECTURES[machine]


def _install(instructions: bytes) -> None:
    set_no_new_privs()  # only then may an unprivileged process install a filter
    set_seccomp_filter(instructions)


def _assembled(architecture: Architecture, rules: dict[int, list[Instruction]]) -> bytes:
    instructions = [
        (LOAD, 0, 0, ARCHITECTURE),
        (IF_EQUAL, 1, 0, architecture.token),
        _return(KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
        (IF_GREATER_EQUAL, 0, 1, X32),  # aarch64 has no numbers as high, either
        _return(KILL_PROCESS),
        *_search(sorted(rules.items())),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _rules(column: int, *, user_namespaces: bool) -> dict[int, list[Instruction]]:
    """Return what to do about each call that is not simply allowed, by number. Each list ends with a return."""
    names = dict(KERNEL_PARTS)
    rules: dict[int, list[Instruction]] = {}
    if not user_namespaces:
        names.update(MOUNTS_AND_NAMESPACES)
        rules[CLONE[column]] = _refuse_flags(NEW_NAMESPACE)
        rules[UNSHARE[column]] = _refuse_flags(NEW_NAMESPACE | NEW_TIME)
        rules[CLONE3[column]] = [_return(REFUSE | errno.ENOSYS)]
    return rules | _refusals(names, column)


def _refusals(names: Mapping[str, tuple[int, int]], column: int) -> dict[int, list[Instruction]]:
    not_permitted = [_return(REFUSE | errno.EPERM)]
    return {numbers[column]: not_permitted for numbers in names.values() if numbers[column] >= 0}


def _refuse_flags(flags: int) -> list[Instruction]:
    refused, allowed = _return(REFUSE | errno.EPERM), _return(ALLOW)
    return [(LOAD, 0, 0, FIRST_ARGUMENT), (IF_SET, 0, 1, flags), refused, allowed]


def _search(rules: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Return instructions that find a number by halving: a filter runs with every call that a process makes."""
    if len(rules) > LEAF:
        middle = len(rules) // 2
        below, above = _search(rules[:middle]), _search(rules[middle:])
        return [(IF_GREATER_EQUAL, len(below), 0, rules[middle][0]), *below, *above]
    found: list[Instruction] = []
    for number, action in rules:
        found += [(IF_EQUAL, 0, len(action), number), *action]
    return [*found, _return(ALLOW)]


def _return(verdict: int) -> Instruction:
    return RETURN, 0, 0, verdict
