"""The filter of system calls in machines, interpreted here as the kernel would: no machine is needed."""

import ctypes
import errno
import struct

import pytest

from guest import seccomp
from guest.seccomp import ALLOW, ARCHITECTURES, KERNEL_PARTS, KILL_PROCESS, MOUNTS_AND_NAMESPACES, REFUSE, program

NOT_PERMITTED, NO_SUCH_CALL = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
I386 = 0x4000_0003
NEW_USER, NEW_NET, THREAD, FILES = 0x1000_0000, 0x4000_0000, 0x0001_0000, 0x0000_0400
both = pytest.mark.parametrize("machine", ARCHITECTURES)


def verdict(filter_: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """Interpret a filter for one call."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, argument, *[0] * 5)
    instructions = list(struct.iter_unpack("=HBBI", filter_))
    at = accumulator = 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        if code == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == seccomp.RETURN:
            return int(operand)
        else:
            tests = {
                seccomp.IF_EQUAL: accumulator == operand,
                seccomp.IF_GREATER_EQUAL: accumulator >= operand,
                seccomp.IF_SET: bool(accumulator & operand),
            }
            at += if_true if tests[code] else if_false


@both
@pytest.mark.parametrize("user_namespaces", [False, True])
def test_every_call_on_the_lists_is_refused_and_no_other(machine: str, user_namespaces: bool):
    architecture = ARCHITECTURES[machine]
    lists = KERNEL_PARTS if user_namespaces else {**KERNEL_PARTS, **MOUNTS_AND_NAMESPACES}
    refused = {numbers[architecture.column] for numbers in lists.values()}
    clone3 = set() if user_namespaces else {seccomp.CLONE3[architecture.column]}
    filter_ = program(architecture, user_namespaces=user_namespaces)
    for number in range(600):
        expected = NOT_PERMITTED if number in refused else NO_SUCH_CALL if number in clone3 else ALLOW
        assert verdict(filter_, architecture.token, number) == expected, number


@pytest.mark.parametrize("user_namespaces", [False, True])
def test_the_parts_of_the_kernel_that_gave_code_more_privileges_most_often_are_refused(user_namespaces: bool):
    """By number, not from the lists of the code: nothing may be left out of them."""
    x86 = ARCHITECTURES["x86_64"]
    io_uring, keys, bpf, userfaultfd, perf = (425, 426, 427), (248, 249, 250), (321,), (323,), (298,)
    for number in (*io_uring, *keys, *bpf, *userfaultfd, *perf):
        assert verdict(program(x86, user_namespaces=user_namespaces), x86.token, number) == NOT_PERMITTED
    for number in (155, 161, 165, 308, 428, 429, 430, 442):  # pivot_root, chroot, mount, setns and their newer forms
        assert verdict(program(x86, user_namespaces=False), x86.token, number) == NOT_PERMITTED


@both
@pytest.mark.parametrize("call", ["CLONE", "UNSHARE"])
def test_new_namespaces_are_refused_by_their_flags(machine: str, call: str):
    architecture = ARCHITECTURES[machine]
    number = getattr(seccomp, call)[architecture.column]
    strict, relaxed = (program(architecture, user_namespaces=allowed) for allowed in (False, True))
    for flags in (NEW_USER, NEW_NET | FILES, NEW_USER | 0x11):
        assert verdict(strict, architecture.token, number, flags) == NOT_PERMITTED
        assert verdict(relaxed, architecture.token, number, flags) == ALLOW
    assert verdict(strict, architecture.token, number, THREAD | FILES) == ALLOW


def test_a_time_namespace_is_refused_without_refusing_an_exit_signal():
    x86 = ARCHITECTURES["x86_64"]
    filter_ = program(x86, user_namespaces=False)
    assert verdict(filter_, x86.token, seccomp.UNSHARE[0], 0x80) == NOT_PERMITTED
    assert verdict(filter_, x86.token, seccomp.CLONE[0], 0x80) == ALLOW


@both
@pytest.mark.parametrize("user_namespaces", [False, True])
def test_calls_of_another_architecture_kill_the_process(machine: str, user_namespaces: bool):
    architecture = ARCHITECTURES[machine]
    filter_ = program(architecture, user_namespaces=user_namespaces)
    others = {I386, *(other.token for other in ARCHITECTURES.values())} - {architecture.token}
    assert {verdict(filter_, other, number) for other in others for number in (1, 56, 165)} == {KILL_PROCESS}
    assert verdict(filter_, architecture.token, seccomp.X32 + 39) == KILL_PROCESS


@both
def test_the_numbers_are_those_that_libseccomp_knows(machine: str):
    architecture = ARCHITECTURES[machine]
    resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    named = {"clone": seccomp.CLONE, "clone3": seccomp.CLONE3, "unshare": seccomp.UNSHARE}
    numbers = {**named, **KERNEL_PARTS, **MOUNTS_AND_NAMESPACES}
    known = {name: resolve(architecture.token, name.encode()) for name in numbers}
    newer = {"open_tree_attr", "quotactl_fd", "mount_setattr"}  # than some releases of the library
    for name, columns in numbers.items():
        ours = columns[architecture.column]
        if not (name in newer and known[name] == -1):
            assert known[name] == ours or (ours < 0 and known[name] < 0), name
