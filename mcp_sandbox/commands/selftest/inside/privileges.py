"""More privileges than code has: users, capabilities, namespaces, limits."""

import ctypes
import os
import resource
import signal
import socket
import stat
import struct

from .attempts import Attempts, libc, read_text

CODE_ID = "1000"  # user and group of code in every sandbox
PR_GET_NO_NEW_PRIVS = 39
CLONE_NEWUSER = 0x1000_0000
NAMESPACES = {
    "mount": 0x0002_0000,
    "cgroup": 0x0200_0000,
    "uts": 0x0400_0000,
    "ipc": 0x0800_0000,
    "pid": 0x2000_0000,
    "network": 0x4000_0000,
}
CLONE, UNSHARE, CLONE3 = 56, 272, 435
WHERE_PROGRAMS_ARE = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/libexec", "/usr/local/bin", "/opt")
WITHOUT_PROGRAMS = ("python3", "dist-packages", "site-packages")  # thousands of files that no shell executes


def hold_privileges() -> Attempts:
    """Look for a user, a group or a capability that code must not have."""
    found = Attempts()
    status = dict(line.split(":\t", 1) for line in read_text("/proc/self/status").splitlines() if ":\t" in line)
    for name in ("Uid", "Gid"):
        found.note(f"{name} {' '.join(status[name].split())}", succeeded=set(status[name].split()) != {CODE_ID})
    groups = set(status["Groups"].split())
    found.note(f"groups {' '.join(groups)}", succeeded=bool(groups - {CODE_ID}))
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd"):
        found.note(f"{name} {status[name]}", succeeded=int(status[name], 16) != 0)
    return found


def become_root() -> Attempts:
    """Try to become another user."""
    found = Attempts()
    found.action("setuid(0)", os.setuid, 0)
    found.action("setgid(0)", os.setgid, 0)
    found.action("setgroups([0])", os.setgroups, [0])
    found.action("setresuid(0, 0, 0)", os.setresuid, 0, 0, 0)
    return found


def gain_by_a_program() -> Attempts:
    """Look for setuid and setgid programs, and whether they would have an effect."""
    found = Attempts()
    new_privileges = libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1
    found.note("no-new-privs is not set", succeeded=new_privileges)
    programs = 0
    for top in WHERE_PROGRAMS_ARE:
        for folder, folders, names in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(WITHOUT_PROGRAMS)]
            for name in names:
                programs += 1
                path = os.path.join(folder, name)
                mode = os.lstat(path).st_mode
                if stat.S_ISREG(mode) and mode & 0o6000:
                    found.note(f"{path} is setuid or setgid", succeeded=True)
    found.note(f"{programs} programs", succeeded=False)
    return found


def raise_limits() -> Attempts:
    """Try to raise each resource limit, and to be killed later than others when memory runs out."""
    found = Attempts()
    for name in sorted(name for name in dir(resource) if name.startswith("RLIMIT_")):
        kind = getattr(resource, name)
        soft, hard = resource.getrlimit(kind)
        if hard == resource.RLIM_INFINITY:
            found.note(f"{name} is unlimited", succeeded=name in ("RLIMIT_NPROC", "RLIMIT_NOFILE"))
            continue
        try:
            resource.setrlimit(kind, (soft, hard + 1))
        except (ValueError, OSError):
            found.note(name, succeeded=False)
        else:
            found.note(name, succeeded=True)
    if int(read_text("/proc/self/oom_score") or 0):  # gVisor has no score: it kills no process of a machine
        found.action("oom_score_adj", _write, "/proc/self/oom_score_adj", b"-999")
    return found


def create_user_namespace() -> Attempts:
    """Try to create a user namespace, which would give all capabilities in it."""
    found = Attempts()
    found.call("unshare", UNSHARE, CLONE_NEWUSER)
    found.call("clone", CLONE, CLONE_NEWUSER | signal.SIGCHLD)
    arguments = ctypes.create_string_buffer(struct.pack("8Q", CLONE_NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0))
    found.call("clone3", CLONE3, arguments, 64)
    return found


def create_other_namespaces() -> Attempts:
    """Try to create namespaces of all other kinds."""
    found = Attempts()
    for kind, flag in NAMESPACES.items():
        found.call(f"unshare: {kind}", UNSHARE, flag)
        found.call(f"clone: {kind}", CLONE, flag | signal.SIGCHLD)
    found.action("setns", _enter, "/proc/self/ns/net")
    return found


def open_raw_sockets() -> Attempts:
    """Try to open sockets that can forge packets."""
    found = Attempts()
    for what, family, kind, protocol in (
        ("raw IPv4", socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        ("raw IPv4 with headers", socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
        ("raw IPv6", socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
        ("packet", socket.AF_PACKET, socket.SOCK_RAW, 0),
        ("cooked packet", socket.AF_PACKET, socket.SOCK_DGRAM, 0),
    ):
        found.action(what, _open_socket, family, kind, protocol)
    return found


def _open_socket(family: int, kind: int, protocol: int) -> None:
    socket.socket(family, kind, protocol).close()


def _enter(path: str) -> None:
    namespace = os.open(path, os.O_RDONLY)
    try:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), path)
    finally:
        os.close(namespace)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data)
