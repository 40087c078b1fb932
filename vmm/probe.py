"""Facts about this host that more than one driver needs, each from something that really ran."""

import os
import re
import secrets
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from vmm import tiny_guest
from vmm.errors import ToolFailed, ToolMissing
from vmm.limits import Hierarchy
from vmm.process import Confinement, run_tool, spawn
from vmm.verdicts import Verdict, Verdicts

KVM_DEVICE = Path("/dev/kvm")
TINY_GUEST = "tiny-guest"  # the question
TINY_GUEST_S = 5.0  # it takes 30 ms with the start of Python, or for ever
TINY_GUEST_CPUS = ("x86_64",)
CONFINE_S = 10.0  # it takes milliseconds
UIDS = range(1_900_000_000, 2_000_000_000)  # nobody's: above all that distributions and systemd hand out
BETTER_HOST = "use a host with hardware virtualization, or name a kernel made for this one's KVM"
ROOT_ADVICE = "root needs its usual rights: in a container, CAP_SYS_ADMIN, CAP_SETUID, CAP_SETGID and CAP_SETPCAP"
USER_ADVICE = "let users make namespaces: see the security settings of this host or of the container it is"
# What forbids user namespaces, its value then, and the one that allows them. Root's machines need them too: they run
# as users without rights.
SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "9999"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
}
WORDS_S = 10.0  # a program says its version in milliseconds


async def kvm(cache_dir: Path, *, own_kernel: bool = False) -> Verdict:
    """Whether KVM really runs a guest here, found out without a monitor and without a guest kernel.

    A no is final for ordinary guests. A yes is worth a try with a whole one: the tiny guest has no devices. It says
    nothing about `own_kernel`, one that people have made for a KVM that cannot run ordinary ones.
    """
    if not KVM_DEVICE.exists():
        return Verdict(False, "this host has no /dev/kvm", "use a host with hardware virtualization")
    if not os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        return Verdict(False, "/dev/kvm may not be opened by this user", "usermod -aG kvm $USER, then log in again")
    if own_kernel:
        return Verdict(None, "/dev/kvm opens; not tried, because only the kernel that was named can tell")
    if (cpu := os.uname().machine) not in TINY_GUEST_CPUS:
        return Verdict(None, f"/dev/kvm opens; not tried, because there is no tiny guest for {cpu} yet")
    verdicts = Verdicts(cache_dir)
    try:
        return await verdicts.ask(TINY_GUEST, partial(_run_tiny_guest, verdicts.file(TINY_GUEST)))
    except FileNotFoundError as error:  # a verdict not worth keeping: it is installed soon
        return Verdict(
            False, f"/dev/kvm opens; not tried, because {error.filename} is not installed", "mcp-sandbox setup"
        )


async def _run_tiny_guest(file: Path) -> Verdict:
    # Its code is our own, so nothing has to be kept from it. And as another user it might not reach this Python.
    argv = [sys.executable, "-I", "-S", tiny_guest.__file__]
    fix = f"{BETTER_HOST} (to have it tried again: rm {file})"
    with anyio.move_on_after(TINY_GUEST_S):
        async with spawn(argv, confinement=Confinement(offline=False)) as process:
            end = await process.wait()
            if end.code == 0 and end.detail == tiny_guest.OK:
                return Verdict(True, "a tiny guest ran under KVM")
            trouble = end.detail if end.code == 0 else f"its guest ended with {_last_line(str(end))}"
            return Verdict(False, f"/dev/kvm opens, but {trouble}", fix)
    return Verdict(False, f"/dev/kvm opens, but a tiny guest did not end in {TINY_GUEST_S:.0f} s", fix, doubtful=True)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def own_user() -> int | None:
    """A user that owns nothing on this host, another one for each machine; None: only root can become one."""
    return secrets.choice(UIDS) if os.geteuid() == 0 else None


async def confinement_trouble(confinement: Confinement) -> Verdict | None:
    """Take the same things away from a process as from a machine; None, or why that cannot be done here."""
    try:
        with anyio.fail_after(CONFINE_S):
            async with spawn(["true"], confinement=confinement) as process:
                end = await process.wait()
                trouble = None if end.code == 0 else str(end)
    except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not there
        trouble = str(error) or f"it did not end in {CONFINE_S:.0f} s"
    if trouble is None:
        return None
    return Verdict(False, f"no process can be confined here: {trouble}", namespace_advice())


def namespace_advice(proc_sys: Path = Path("/proc/sys")) -> str:
    """What would let machines have namespaces of their own: the switches of this host that forbid it, or in general."""
    forbidding = [name for name, (closed, _) in SWITCHES.items() if _first_line(proc_sys / name) == closed]
    if forbidding:
        orders = " ".join(f"{name.replace('/', '.')}={SWITCHES[name][1]}" for name in forbidding)
        return f"let users make namespaces: sysctl -w {orders}"
    return ROOT_ADVICE if os.geteuid() == 0 else USER_ADVICE


async def words_of(program: str, *arguments: str) -> str:
    """What a program says about itself; nothing if it fails, or does not end."""
    lines: list[str] = []
    with suppress(ToolFailed, ToolMissing, OSError, TimeoutError), anyio.fail_after(WORDS_S):
        await run_tool([program, *arguments], on_line=lines.append)
    return "\n".join(lines)


def _first_line(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""


def not_in_force(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Protections this host or this user does not give to machines."""
    missing = [] if (gap := hierarchy.gap()) is None else [gap]
    if os.geteuid() != 0:
        missing.append("all machines run as this user: only root can give each one a user of its own")
    return tuple(missing)


def cpu_model() -> str:
    """The host CPU's name: snapshots taken under KVM only continue on the same kind."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"
