"""Probes of this host that several drivers need. Each result comes from something that really ran."""

import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from vmm import tiny_guest
from vmm.errors import ToolFailed, ToolMissing
from vmm.limits import Hierarchy
from vmm.process import Confinement, run_tool, spawn
from vmm.types import Exit
from vmm.verdicts import Verdict, Verdicts

KVM_DEVICE = Path("/dev/kvm")
OTHERS_RW, GROUP_RW = 0o006, 0o060
TINY_GUEST = "tiny-guest"  # the question
TINY_GUEST_S = 5.0  # it takes 30 ms including the start of Python, or it never ends
TINY_GUEST_CPUS = ("x86_64",)
KVM_DEADLINE_S = 15.0  # a guest that boots under KVM at all prints its word within a second
INIT_SAYS = "mcp-sandbox: "  # how the initramfs begins an error
PROBE_WORD = "MCP_SANDBOX_PROBE_OK"  # the initramfs prints it when the kernel command line has mcp_sandbox.probe
NO_KERNEL = Verdict(False, "there is no guest kernel yet to try KVM with", "mcp-sandbox setup")
CONFINE_S = 10.0  # it takes milliseconds
UIDS = range(1_900_000_000, 2_000_000_000)  # unused: above what distributions and systemd assign
BETTER_HOST = "use a host with hardware virtualization, or set guest_kernel to a kernel built for this KVM"
ROOT_ADVICE = "give root its usual capabilities: in a container CAP_SYS_ADMIN, CAP_SETUID, CAP_SETGID and CAP_SETPCAP"
PTRACE_ADVICE = "in a container, give root CAP_SYS_PTRACE, too"  # to look into processes of other users
USER_ADVICE = "allow user namespaces in the security settings of this host or container"
# Sysctls that forbid user namespaces: the value that does, and one that does not. Root's machines need user namespaces,
# too, because they run as unprivileged users.
SYSCTLS = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "9999"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
}
VERSION_S = 10.0  # a program prints its version in milliseconds
VERSION_LINES = 1000  # gVisor prints 200 about its options


async def kvm(cache_dir: Path, *, own_kernel: bool = False) -> Verdict:
    """Return whether KVM runs a tiny guest, which needs neither QEMU nor a guest kernel.

    If not, no ordinary guest will boot. If it does, booting a real one is worth a try. A kernel that the user chose may
    boot either way: it may be built for a KVM that cannot run ordinary guests.
    """
    if not KVM_DEVICE.exists():
        return Verdict(False, "this host has no /dev/kvm", "use a host with hardware virtualization")
    if not os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        return Verdict(False, "this user may not open /dev/kvm", "usermod -aG kvm $USER, then log in again")
    if own_kernel:
        return Verdict(None, "/dev/kvm opens; not tried, because only booting guest_kernel can tell")
    if (cpu := os.uname().machine) not in TINY_GUEST_CPUS:
        return Verdict(None, f"/dev/kvm opens; not tried, because there is no tiny guest for {cpu}")
    verdicts = Verdicts(cache_dir)
    try:
        return await verdicts.ask(TINY_GUEST, partial(_run_tiny_guest, verdicts.file(TINY_GUEST)))
    except FileNotFoundError as error:  # not cached: the program may be installed any time
        return Verdict(
            False, f"/dev/kvm opens; not tried, because {error.filename} is not installed", "mcp-sandbox setup"
        )


async def _run_tiny_guest(file: Path) -> Verdict:
    # The guest's code is ours, so it needs no confinement, and another user might not be able to run this Python.
    argv = [sys.executable, "-I", "-S", tiny_guest.__file__]
    fix = f"{BETTER_HOST} (to probe again: rm {file})"
    with anyio.move_on_after(TINY_GUEST_S):
        async with spawn(argv, confinement=Confinement(offline=False)) as process:
            end = await process.wait()
            if end.code == 0 and end.detail == tiny_guest.OK:
                return Verdict(True, "a tiny guest ran under KVM")
            trouble = end.detail if end.code == 0 else f"the probe ended with {last_line(str(end))}"
            return Verdict(False, f"/dev/kvm opens, but {trouble}", fix)
    return Verdict(False, f"/dev/kvm opens, but a tiny guest did not end in {TINY_GUEST_S:.0f} s", fix, doubtful=True)


async def boots(boot: Callable[[], Awaitable[Exit]], file: Path) -> Verdict:
    """Return whether a guest boots under KVM. `boot` starts one that prints a word and ends, and returns how it ended.

    The verdict is cached in `file`.
    """
    fix = f"{BETTER_HOST} (to probe again: rm {file})"
    with anyio.move_on_after(KVM_DEADLINE_S):
        end = await boot()
        if PROBE_WORD in end.detail:
            return Verdict(True, "a guest booted under KVM")
        said = (line for line in end.detail.splitlines() if line.startswith(INIT_SAYS))
        why = next(said, str(end).splitlines()[0])
        killed = end.signal == signal.SIGKILL  # perhaps because the host had no memory left
        return Verdict(False, f"/dev/kvm opens, but the guest ended with {why}", fix, doubtful=killed)
    return Verdict(False, f"/dev/kvm opens, but no guest booted in {KVM_DEADLINE_S:.0f} s", fix, doubtful=True)


def last_line(text: str) -> str:
    """Return the last line of what a program printed."""
    return text.strip().splitlines()[-1]


def own_user() -> int | None:
    """Return a random uid that owns nothing on this host, one for each machine; None if we are not root."""
    return secrets.choice(UIDS) if os.geteuid() == 0 else None


async def confinement_trouble(confinement: Confinement) -> Verdict | None:
    """Start a process confined like a machine; return None, or why that fails on this host."""
    try:
        with anyio.fail_after(CONFINE_S):
            async with spawn(["true"], confinement=confinement) as process:
                end = await process.wait()
                trouble = None if end.code == 0 else str(end)
    except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not installed
        trouble = str(error) or f"it did not end in {CONFINE_S:.0f} s"
    if trouble is None:
        return None
    return Verdict(False, f"processes cannot be confined on this host: {trouble}", namespace_advice())


def namespace_advice(proc_sys: Path = Path("/proc/sys")) -> str:
    """Return what would allow machines their namespaces: the sysctls to change, or general advice."""
    forbidding = [name for name, (forbids, _) in SYSCTLS.items() if _first_line(proc_sys / name) == forbids]
    if forbidding:
        settings = " ".join(f"{name.replace('/', '.')}={SYSCTLS[name][1]}" for name in forbidding)
        return f"allow user namespaces: sysctl -w {settings}"
    return ROOT_ADVICE if os.geteuid() == 0 else USER_ADVICE


async def version_output(program: str, *arguments: str, pass_fds: Sequence[int] = ()) -> str:
    """Return what a program prints about its version; nothing if it fails or does not end."""
    lines: list[str] = []

    def keep(line: str) -> None:
        if len(lines) < VERSION_LINES:
            lines.append(line)

    with suppress(ToolFailed, ToolMissing, OSError, TimeoutError), anyio.fail_after(VERSION_S):
        await run_tool([program, *arguments], on_line=keep, pass_fds=pass_fds)
        return "\n".join(lines)
    return ""


def _first_line(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""


def privileges() -> dict[str, object]:
    """Return what decides which namespaces this process may create. Another container of the same home differs."""
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "status": [line for line in status if line.startswith(("Cap", "NoNewPrivs:", "Seccomp"))],
        "label": _first_line(Path("/proc/self/attr/current")),
        "namespaces": [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("user", "mnt", "pid")],
        "sysctls": [_first_line(Path("/proc/sys") / name) for name in SYSCTLS],
    }


def identity(binary: Path) -> dict[str, object]:
    """Return what changes if another program takes the place of this one."""
    status = binary.stat()
    return {"binary": [str(binary), status.st_size, status.st_mtime_ns]}


def missing_protections(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Return the protections that machines lack on this host or because of this user, one sentence each."""
    missing = [] if (gap := hierarchy.gap()) is None else [gap]
    if os.geteuid() != 0:
        missing.append("all machines run as this user: only root can give each one its own user")
    return tuple(missing)


def missing_with_kvm() -> tuple[str, ...]:
    """Return the protections that machines lack because of who may open /dev/kvm, one sentence each."""
    if os.geteuid() == 0 and kvm_confinement(offline=True).uid is None:
        return ("machines run as root, because only root may open /dev/kvm: chgrp kvm /dev/kvm; chmod 660 /dev/kvm",)
    return ()


def kvm_confinement(*, offline: bool) -> Confinement:
    """Return how to confine a process that must be able to open /dev/kvm, perhaps by its group."""
    device = KVM_DEVICE.stat()
    if device.st_mode & OTHERS_RW == OTHERS_RW:
        return Confinement(own_user(), offline=offline)
    if device.st_mode & GROUP_RW == GROUP_RW and device.st_gid != 0:
        return Confinement(own_user(), (device.st_gid,), offline=offline)
    return Confinement(offline=offline)
