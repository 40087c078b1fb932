"""The seccomp filters of machines that share the host's kernel.

The first filter is an allow list. A system call that is not on it, including future ones, fails with ENOSYS, which
makes a C library fall back to an older one. Known privileged calls fail with EPERM. Calls of another architecture,
32-bit x86 and x32 included, kill the process.

libseccomp knows the numbers of the calls on every architecture and compiles the filters. Every system with systemd or
apt has it. We call the six functions that we need with ctypes: the library's own Python binding is not on PyPI, and
`pyseccomp`, which is, uses ctypes as well and has had no release since 2021.
"""

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from vmm.errors import DriverUnavailable

LIBRARY = "libseccomp.so.2"
INSTALL = "apt-get install libseccomp2"

KILL_PROCESS, ERRNO, ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000  # these and the following from <seccomp.h>
EQUAL, MASKED_EQUAL = 4, 7
OTHER_ARCHITECTURE, OPTIMIZE, BINARY_TREE = 2, 8, 2
UNKNOWN_CALL = -1

FILES = """
    access faccessat faccessat2 chdir fchdir getcwd chmod fchmod fchmodat fchmodat2 chown fchown fchownat lchown umask
    open openat openat2 creat close close_range dup dup2 dup3 fcntl ioctl flock memfd_create pipe pipe2
    read readv pread64 preadv preadv2 write writev pwrite64 pwritev pwritev2 lseek
    sendfile copy_file_range splice tee fadvise64 readahead fallocate truncate ftruncate
    sync fsync fdatasync syncfs sync_file_range
    stat lstat fstat newfstatat statx statfs fstatfs getdents getdents64 readlink readlinkat
    link linkat symlink symlinkat mkdir mkdirat mknod mknodat rename renameat renameat2 rmdir unlink unlinkat
    utime utimes utimensat futimesat inotify_init inotify_init1 inotify_add_watch inotify_rm_watch
    getxattr lgetxattr fgetxattr setxattr lsetxattr fsetxattr
    listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr
"""
WAITING = """
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
"""
MEMORY = """
    brk mmap munmap mremap mprotect madvise mincore msync mlock mlock2 munlock mlockall munlockall membarrier
    pkey_alloc pkey_free pkey_mprotect mseal
"""
PROCESSES = """
    clone fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal
    getpid getppid gettid getpgid getpgrp setpgid getsid setsid prctl arch_prctl set_tid_address
    futex futex_waitv futex_wait futex_wake futex_requeue set_robust_list get_robust_list rseq restart_syscall
    getpriority setpriority ioprio_get ioprio_set getrlimit setrlimit prlimit64 getrusage times getcpu
    sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getattr sched_setattr
    sched_getscheduler sched_setscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval
    getuid geteuid getgid getegid getresuid getresgid getgroups capget capset
    setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups
    seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
    uname sysinfo getrandom
"""
SIGNALS_AND_TIME = """
    rt_sigaction rt_sigprocmask rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigreturn sigaltstack pause
    rt_sigqueueinfo rt_tgsigqueueinfo alarm getitimer setitimer
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time
    timer_create timer_settime timer_gettime timer_getoverrun timer_delete
"""
SOCKETS_AND_IPC = """
    bind listen accept accept4 connect shutdown getsockname getpeername getsockopt setsockopt
    sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg
    shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
"""
ALLOWED = (FILES, WAITING, MEMORY, PROCESSES, SIGNALS_AND_TIME, SOCKETS_AND_IPC)

# Privileged calls, access to other processes, and parts of the kernel whose bugs have let code escape from containers.
REFUSED = """
    mount umount2 mount_setattr move_mount open_tree fsopen fsconfig fsmount fspick pivot_root chroot
    unshare setns sethostname setdomainname
    ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp
    init_module finit_module delete_module kexec_load kexec_file_load reboot
    bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register vmsplice
    add_key request_key keyctl open_by_handle_at name_to_handle_at fanotify_init
    swapon swapoff acct quotactl quotactl_fd syslog vhangup lookup_dcookie nfsservctl
    clock_settime settimeofday clock_adjtime adjtimex
    ioperm iopl modify_ldt mbind set_mempolicy migrate_pages move_pages
"""


class _Argument(ctypes.Structure):
    """One comparison of an argument: `scmp_arg_cmp`."""

    _fields_ = (("index", ctypes.c_uint), ("how", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class Rule(NamedTuple):
    """What happens to a call with matching arguments."""

    action: int
    call: str
    arguments: tuple[tuple[int, int, int, int], ...] = ()  # index, comparison, and its two operands


def _is(index: int, value: int) -> tuple[int, int, int, int]:
    return index, EQUAL, value, 0


def _has(index: int, mask: int, value: int) -> tuple[int, int, int, int]:
    return index, MASKED_EQUAL, mask, value


NOT_PERMITTED = ERRNO | errno.EPERM
INT = 0xFFFF_FFFF  # the kernel ignores the upper half of an `int` argument, so a comparison must, too

# No packet leaves a machine: its network namespace has only a loopback device. Programs may connect to themselves with
# TCP and UDP. Other families, netlink included, would only expose more kernel code; the C library needs none of them.
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
STREAM, DATAGRAM, SOCKET_TYPE = 1, 2, 0xF  # the other bits are flags
TCP, UDP = 6, 17
INTERNET = [(STREAM, 0), (STREAM, TCP), (DATAGRAM, 0), (DATAGRAM, UDP)]
PERSONALITY_LINUX, PERSONALITY_QUERY = 0, 0xFFFF_FFFF

ALLOW_LIST = [
    *(Rule(ALLOW, call) for calls in ALLOWED for call in calls.split()),
    *(Rule(NOT_PERMITTED, call) for call in REFUSED.split()),
    *(Rule(ALLOW, call, (_has(0, INT, AF_UNIX),)) for call in ("socket", "socketpair")),
    *(
        Rule(ALLOW, "socket", (_has(0, INT, family), _has(1, SOCKET_TYPE, kind), _has(2, INT, protocol)))
        for family in (AF_INET, AF_INET6)
        for kind, protocol in INTERNET
    ),
    *(Rule(ALLOW, "personality", (_is(0, persona),)) for persona in (PERSONALITY_LINUX, PERSONALITY_QUERY)),
]

# What allowed calls must not do. This is a second filter: libseccomp cannot express "all but these flags", while the
# kernel applies the stricter result of two filters. `clone3` has its flags in memory, so it is not on the allow list.
NAMESPACES = (0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # type into a terminal, paste into a console
# The agent is process 1 and has the user of code, which must not take its limits, its CPU or its priority away.
AGENT = 1
ON_ITS_FIRST_ARGUMENT = "prlimit64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler"
ON_ALL_OF_A_USER = {"setpriority": 2, "ioprio_set": 3}  # PRIO_USER, IOPRIO_WHO_USER: the agent is among these
EXCEPTIONS = [
    *(Rule(NOT_PERMITTED, "clone", (_has(0, flag, flag),)) for flag in NAMESPACES),
    *(Rule(NOT_PERMITTED, "ioctl", (_has(1, INT, order),)) for order in (TIOCSTI, TIOCLINUX)),
    *(Rule(NOT_PERMITTED, call, (_has(0, INT, AGENT),)) for call in ON_ITS_FIRST_ARGUMENT.split()),
    *(Rule(NOT_PERMITTED, call, (_has(1, INT, AGENT),)) for call in ON_ALL_OF_A_USER),
    *(Rule(NOT_PERMITTED, call, (_has(0, INT, which),)) for call, which in ON_ALL_OF_A_USER.items()),
]


@cache
def filters() -> tuple[bytes, bytes]:
    """Return both filters as bytecode for this host's architecture; raise DriverUnavailable."""
    return _compile(ERRNO | errno.ENOSYS, ALLOW_LIST), _compile(ALLOW, EXCEPTIONS)


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverUnavailable(f"cannot create the seccomp filter: {error}", fix=INSTALL) from error
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    library.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.seccomp_rule_add_array.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Argument))
    ]
    return library


def _compile(default: int, rules: Iterable[Rule]) -> bytes:
    library = _library()
    with _filter(default) as program:
        for rule in rules:
            number = library.seccomp_syscall_resolve_name(rule.call.encode())
            if number == UNKNOWN_CALL:  # newer than the library: then it fails with ENOSYS
                continue
            arguments = (_Argument * len(rule.arguments))(*(_Argument(*argument) for argument in rule.arguments))
            _check(library.seccomp_rule_add_array(program, rule.action, number, len(arguments), arguments), rule)
        file = os.memfd_create("seccomp", os.MFD_CLOEXEC)
        try:
            _check(library.seccomp_export_bpf(program, file), None)
            return os.pread(file, os.fstat(file).st_size, 0)
        finally:
            os.close(file)


@contextmanager
def _filter(default: int) -> Iterator[int]:
    library = _library()
    program = library.seccomp_init(default)
    try:
        _check(library.seccomp_attr_set(program, OTHER_ARCHITECTURE, KILL_PROCESS), None)
        library.seccomp_attr_set(program, OPTIMIZE, BINARY_TREE)  # before libseccomp 2.5 it stays linear
        yield program
    finally:
        library.seccomp_release(program)


def _check(status: int, rule: Rule | None) -> None:
    if status < 0:
        trouble = os.strerror(-status) + (f" ({rule.call})" if rule else "")
        raise DriverUnavailable(f"cannot create the seccomp filter: {LIBRARY}: {trouble}")
