"""Which system calls the seccomp filters refuse to code in a bubblewrap machine, and what still works."""

import errno
import platform
import signal

import pytest

from tests.functional.bubblewrap_harness import RunnableMachine
from vmm import seccomp

pytestmark = [pytest.mark.vm, pytest.mark.rights]

NOT_PERMITTED, NO_SUCH_CALL = errno.EPERM, errno.ENOSYS
NEW_NAMESPACES = (0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
ADDR_NO_RANDOMIZE, READ_IMPLIES_EXEC = 0x0040000, 0x0400000

CALL = """
import ctypes, os
kernel = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    words = [ctypes.c_ulong(argument) for argument in arguments] + [ctypes.c_ulong(0)] * (6 - len(arguments))
    return ctypes.get_errno() if kernel.syscall(ctypes.c_long(number), *words) == -1 else 0
"""
HOW_IT_ENDS = """
child = os.fork()
if child == 0:
    {body}
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def number(name: str) -> int:
    """Return the number of a system call on this architecture."""
    return int(seccomp._library().seccomp_syscall_resolve_name(name.encode()))


async def errors(inside: RunnableMachine, *calls: tuple[int | str, ...]) -> list[int]:
    """Make calls in the machine and return their errors; 0 for success."""
    numbers = [(number(name) if isinstance(name, str) else name, *arguments) for name, *arguments in calls]
    found = await inside.run(f"{CALL}\nprint([call(*one) for one in {numbers}])")
    return [int(error) for error in found.strip("[]").split(",")]


FORBIDDEN = {
    "mounting": ["mount", "umount2", "move_mount", "open_tree", "fsopen", "fsmount", "mount_setattr", "pivot_root"],
    "other roots and namespaces": ["chroot", "unshare", "setns", "sethostname"],
    "other processes' memory": ["ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"],
    "kernel modules and reboots": ["init_module", "finit_module", "delete_module", "kexec_load", "reboot"],
    "code in the kernel": ["bpf", "perf_event_open", "userfaultfd"],
    "asynchronous calls": ["io_uring_setup", "io_uring_enter", "io_uring_register"],
    "keys": ["add_key", "request_key", "keyctl"],
    "files by handle": ["open_by_handle_at", "name_to_handle_at"],
    "the whole host": ["swapon", "swapoff", "acct", "quotactl", "syslog", "clock_settime", "settimeofday"],
    "placement of memory": ["mbind", "set_mempolicy", "migrate_pages", "move_pages"],
}


@pytest.mark.parametrize("calls", FORBIDDEN.values(), ids=FORBIDDEN)
async def test_privileged_calls_are_refused(inside: RunnableMachine, calls: list[str]):
    found = await errors(inside, *((call,) for call in calls))
    assert dict(zip(calls, found, strict=True)) == dict.fromkeys(calls, NOT_PERMITTED)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has these calls")
async def test_calls_for_pc_hardware_are_refused(inside: RunnableMachine):
    assert await errors(inside, ("ioperm",), ("iopl",), ("modify_ldt",)) == [NOT_PERMITTED] * 3


async def test_an_unlisted_call_does_not_exist(inside: RunnableMachine):
    assert await errors(inside, (100_000,), ("io_setup",), ("remap_file_pages",)) == [NO_SUCH_CALL] * 3


async def test_no_process_can_be_started_in_a_new_namespace(inside: RunnableMachine):
    found = await errors(inside, *(("clone", flag | signal.SIGCHLD) for flag in NEW_NAMESPACES))
    assert found == [NOT_PERMITTED] * len(NEW_NAMESPACES)
    assert await errors(inside, ("clone3",)) == [NO_SUCH_CALL]


async def test_typing_into_a_terminal_is_refused(inside: RunnableMachine):
    orders = [order | upper for order in (TIOCSTI, TIOCLINUX) for upper in (0, 1 << 32)]
    assert await errors(inside, *(("ioctl", 0, order) for order in orders)) == [NOT_PERMITTED] * len(orders)


async def test_a_process_cannot_change_its_personality(inside: RunnableMachine):
    found = await errors(
        inside, ("personality", ADDR_NO_RANDOMIZE), ("personality", READ_IMPLIES_EXEC), ("personality", 0xFFFF_FFFF)
    )
    assert found == [NO_SUCH_CALL, NO_SUCH_CALL, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        "socket.AF_NETLINK, socket.SOCK_RAW",
        "socket.AF_PACKET, socket.SOCK_RAW",
        "socket.AF_VSOCK, socket.SOCK_STREAM",
        "socket.AF_ALG, socket.SOCK_SEQPACKET",
        "socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP",
        "socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP",
        "socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_SCTP",
        "socket.AF_INET6, socket.SOCK_SEQPACKET",
    ],
)
async def test_unusual_sockets_do_not_exist(inside: RunnableMachine, arguments: str):
    assert "Function not implemented" in await inside.run(f"import socket\nsocket.socket({arguments})")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has three kinds of calls")
@pytest.mark.parametrize(
    "body",
    [
        "kernel.syscall(ctypes.c_long(0x4000_0000 + 39))",  # as x32
        "machine_code = mmap.mmap(-1, 4096, prot=7); machine_code.write(bytes.fromhex('b814000000cd80c3')); "
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(machine_code)))()",  # as 32-bit
    ],
    ids=["x32", "32-bit"],
)
async def test_calls_of_another_architecture_kill_the_process(inside: RunnableMachine, body: str):
    found = await inside.run(f"import mmap\n{CALL}{HOW_IT_ENDS.format(body=body)}")
    assert int(found) in (-signal.SIGSYS, -signal.SIGSEGV)  # the latter where the kernel has no 32-bit calls at all


async def test_programs_threads_and_processes_run(inside: RunnableMachine):
    code = """
import multiprocessing, subprocess, threading
said = []
threads = [threading.Thread(target=said.append, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with multiprocessing.get_context("fork").Pool(2) as pool:
    squares = pool.map(int(2).__mul__, range(4))
print(sorted(said), squares, subprocess.run(["/bin/sh", "-c", "echo $((6 * 7)) | { read x; echo $x; }"],
    capture_output=True, text=True, check=True).stdout.strip())
"""
    assert await inside.run(code) == "[0, 1, 2, 3, 4, 5, 6, 7] [0, 2, 4, 6] 42"


async def test_numpy_works(inside: RunnableMachine):
    code = "import numpy as np\nm = np.arange(90_000.0).reshape(300, 300)\nprint(np.allclose(m @ np.eye(300), m))"
    assert await inside.run(code) == "True"


async def test_programs_can_connect_to_themselves(inside: RunnableMachine):
    code = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    peer, _ = server.accept()
    client.sendall(b"hello")
    print(peer.recv(5))
    peer.close()
"""
    assert await inside.run(code) == "b'hello'"
