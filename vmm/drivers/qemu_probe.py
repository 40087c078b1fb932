"""Whether QEMU can run machines on this host, and how well: each verdict from something that really ran."""

import json
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

import anyio

from vmm.driver import DriverConfig
from vmm.drivers import qemu_command as command
from vmm.errors import ToolFailed
from vmm.limits import Hierarchy
from vmm.process import Confinement, run_tool, spawn
from vmm.types import Accel, GuestKernel, Probe

KVM_DEADLINE_S = 15.0  # a guest that boots at all under KVM prints its word within one second
CONFINE_DEADLINE_S = 10.0  # it takes milliseconds
PROBE_WORD = "MCP_SANDBOX_PROBE_OK"  # what the initramfs prints when it is asked to
KVM_DEVICE = Path("/dev/kvm")
UIDS = range(1_900_000_000, 2_000_000_000)  # nobody's: above all that distributions and systemd hand out
EVERYBODY, GROUP = 0o006, 0o060  # may read and write
BETTER_HOST = "use a host with hardware virtualization, or name a kernel made for this one's KVM"
ROOT_ADVICE = "root needs its usual rights: in a container, CAP_SYS_ADMIN, CAP_SETUID, CAP_SETGID and CAP_SETPCAP"
USER_ADVICE = "let users make namespaces: sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=9999"
INSTALL = "apt-get install qemu-system-x86"


async def probe(config: DriverConfig, hierarchy: Hierarchy) -> Probe:
    """Can QEMU run machines here, and with which accelerator?"""
    binary = command.find_binary()
    if binary is None:
        return Probe(usable=False, reason=f"{command.SYSTEM} is not installed", fix=INSTALL)
    version = await _version(binary)
    trouble = await _confinement_trouble()
    if trouble is not None:
        reason = f"no process can be confined here: {trouble}"
        return Probe(
            usable=False, reason=reason, fix=ROOT_ADVICE if os.geteuid() == 0 else USER_ADVICE, version=version
        )
    missing = _not_in_force(hierarchy)
    if config.accel is Accel.TCG:
        return Probe(True, "emulation (TCG), as asked for", None, Accel.TCG, version, missing)
    works, reason, fix = await kvm_boots(config, binary, version)
    if works:
        return Probe(True, reason, None, Accel.KVM, version, (*missing, *_kvm_not_in_force()))
    if config.accel is Accel.KVM:
        return Probe(False, reason, fix, None, version, missing)
    return Probe(True, f"emulation (TCG): {reason}", fix, Accel.TCG, version, missing)


async def kvm_boots(config: DriverConfig, binary: str, version: str) -> tuple[bool, str, str | None]:
    """Whether a guest really boots under KVM: (verdict, reason, what would help). Kept until the host reboots."""
    if not KVM_DEVICE.exists():
        return False, "this host has no /dev/kvm", "use a host with hardware virtualization"
    if not os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        return False, "/dev/kvm may not be opened by this user", "usermod -aG kvm $USER, then log in again"
    if config.kernel is None:
        return False, "no guest kernel yet to try KVM with", "mcp-sandbox setup"
    cache = config.cache_dir / "kvm.json"
    question = {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "qemu": version,
        "kernel": [str(config.kernel.vmlinuz), str(config.kernel.initramfs)],
        "user": os.geteuid(),
    }
    with suppress(OSError, ValueError):
        known = json.loads(cache.read_text())
        if known["question"] == question:
            return known["works"], known["reason"], known["fix"]
    trouble = await _boot(binary, config.kernel)
    works = trouble is None
    reason = f"/dev/kvm opens, but {trouble}" if trouble else "a guest booted under KVM"
    fix = None if works else f"{BETTER_HOST} (to have it tried again: rm {cache})"
    with suppress(OSError):  # a verdict that cannot be kept is still a verdict
        cache.parent.mkdir(parents=True, exist_ok=True)
        scratch = cache.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"question": question, "works": works, "reason": reason, "fix": fix}))
        scratch.replace(cache)
    return works, reason, fix


async def _boot(binary: str, kernel: GuestKernel) -> str | None:
    """Boot a guest that prints a word and ends; None, or what went wrong."""
    with kernel.vmlinuz.open("rb") as vmlinuz, kernel.initramfs.open("rb") as initramfs:
        files = (vmlinuz.fileno(), initramfs.fileno())
        argv = command.probe_argv(binary, Accel.KVM, *files)
        with anyio.move_on_after(KVM_DEADLINE_S):
            async with spawn(argv, confinement=confinement(Accel.KVM), pass_fds=files) as process:
                end = await process.wait()
                return None if PROBE_WORD in end.detail else f"the guest ended with {str(end).splitlines()[0]}"
    return f"no guest booted in {KVM_DEADLINE_S:.0f} s"


async def _confinement_trouble() -> str | None:
    """Take the same things away from a process as from a machine; None, or what went wrong."""
    try:
        with anyio.fail_after(CONFINE_DEADLINE_S):
            async with spawn(["true"], confinement=confinement(Accel.TCG)) as process:
                end = await process.wait()
                return None if end.code == 0 else str(end)
    except (OSError, TimeoutError) as error:  # OSError: unshare or setpriv is not there
        return str(error) or f"it did not end in {CONFINE_DEADLINE_S:.0f} s"


async def _version(binary: str) -> str:
    lines: list[str] = []
    with suppress(ToolFailed):
        await run_tool([binary, "--version"], on_line=lines.append)
    found = re.search(r"version (\S+)(?: \(([^)]*)\))?", lines[0] if lines else "")
    return f"QEMU {found[2] or found[1]}" if found else "QEMU of unknown version"


def confinement(accel: Accel) -> Confinement:
    """What a machine's process may be: a user that owns nothing on this host, another one for each machine.

    Only root can become one. With KVM it has to be allowed to open the device, by the device's group if need be.
    """
    if os.geteuid() != 0:
        return Confinement()
    if accel is not Accel.KVM:
        return Confinement(uid=secrets.choice(UIDS))
    device = KVM_DEVICE.stat()
    if device.st_mode & EVERYBODY == EVERYBODY:
        return Confinement(uid=secrets.choice(UIDS))
    if device.st_mode & GROUP == GROUP and device.st_gid != 0:
        return Confinement(uid=secrets.choice(UIDS), groups=(device.st_gid,))
    return Confinement()


def _kvm_not_in_force() -> tuple[str, ...]:
    if os.geteuid() == 0 and confinement(Accel.KVM).uid is None:
        return ("machines run as root, because nobody else may open /dev/kvm: chgrp kvm /dev/kvm; chmod 660 /dev/kvm",)
    return ()


def _not_in_force(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Protections this host or this user does not give us."""
    missing = []
    if not hierarchy.usable:
        missing.append(f"no host-side limits on memory, CPU and processes: {hierarchy.reason}")
    if os.geteuid() != 0:
        missing.append("all machines run as this user: only root can give each one a user of its own")
    return tuple(missing)


def cpu_model() -> str:
    """The host CPU's name: snapshots taken under KVM only continue on the same kind."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"
