"""The QEMU command line of a machine, computed from its spec."""

import hashlib
import json
from dataclasses import astuple, dataclass
from pathlib import Path

from vmm.limits import rlimit_argv
from vmm.namespaces import in_namespaces
from vmm.process import find_tool
from vmm.types import Accel, DiskRate, GuestKernel, MachineSpec

KVM_DEVICE = "/dev/kvm"
# Debian's small KVM-only build lacks the seccomp sandbox.
SYSTEM = "qemu-system-x86_64"

# QEMU's cache of translated code. A smaller one saves memory per machine, but code that does not fit is translated
# again and again.
TCG_CACHE_MB = 64
# Threads of QEMU: one per CPU, main, RCU, and a pool for disk requests.
THREADS = 96
STACK_MB = 8  # the C library maps so much for each thread's stack

MAC = "52:54:00:00:00:01"  # all machines can have the same: each is alone with its host on its link

CONSOLE_ARGS = "console=ttyS0 quiet reboot=t panic=-1"  # a reboot ends the machine, see -no-reboot
# One tenant, thrown away after use: no security modules, no accounting, no zeroing of memory before use, no huge pages,
# which a small write would copy whole. Less code to translate, and more memory that clones share.
LEAN_ARGS = "lsm=capability audit=0 psi=0 nowatchdog init_on_alloc=0 transparent_hugepage=never"
# An emulated CPU does not speculate. Processes with libraries at the same addresses share translated code.
EMULATED_ARGS = "mitigations=off norandmaps tsc=reliable"

# x86-64-v2, which current numpy wheels require. Emulating wider vectors gains nothing.
KVM_CPU = "host,vmx=off,svm=off"  # no virtualization inside: KVM's part for that is large, and machines need none
TCG_CPU = "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt"


_LIMITED = "limited-"  # begins the name of a disk behind its limit


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The open files of a machine: it needs no path on the host."""

    memory: int
    image: int
    disk: int
    agent: int
    monitor: int
    vmlinuz: int | None = None  # None: the machine is restored and boots nothing
    initramfs: int | None = None
    tap: int | None = None  # None: the machine's network card leads nowhere

    def all(self) -> tuple[int, ...]:
        return tuple(file for file in astuple(self) if file is not None)


def find_binary() -> str | None:
    """Return the path of QEMU, or None."""
    return find_tool(SYSTEM)


def in_machine(argv: list[str], accel: Accel) -> list[str]:
    """Return `argv`, a command of QEMU, in new namespaces, without any capability."""
    devices = [KVM_DEVICE] if accel is Accel.KVM else []
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    # Inside the namespaces the kernel counts only the machine's threads, outside all of the user's.
    return in_namespaces([*powerless, *argv], programs=True, devices=devices, limits=rlimit_argv(processes=THREADS))


def machine_argv(
    binary: str, spec: MachineSpec, accel: Accel, files: Descriptors, *, shared: bool, tsc_khz: int | None
) -> list[str]:
    """Return the command of a machine that boots its kernel, or of one that waits for a state to restore."""
    restore = files.vmlinuz is None
    share = "on" if shared else "off"
    return [
        *base_argv(binary, accel),
        *("-smp", str(spec.vcpus), "-m", f"{spec.memory_mb}M", "-M", "memory-backend=ram"),
        "-object",
        f"memory-backend-file,id=ram,size={spec.memory_mb}M,mem-path=/proc/self/fd/{files.memory},share={share}",
        *("-add-fd", f"fd={files.image},set=1", "-add-fd", f"fd={files.disk},set=2"),
        "-blockdev",
        "driver=file,node-name=image,filename=/dev/fdset/1,read-only=on,locking=off",
        "-blockdev",
        "driver=file,node-name=disk,filename=/dev/fdset/2,locking=off,discard=unmap",
        *_limited(spec.disk_rate, "image", "read-only=on"),
        *_limited(spec.disk_rate, "disk", "discard=unmap"),
        *("-device", f"virtio-blk-device,drive={_LIMITED if spec.disk_rate else ''}image"),
        *("-device", f"virtio-blk-device,drive={_LIMITED if spec.disk_rate else ''}disk,werror=report,rerror=report"),
        *("-chardev", f"socket,id=agent,fd={files.agent}"),
        *("-device", "virtio-serial-device,max_ports=2"),
        *("-device", "virtserialport,chardev=agent,name=agent"),
        # Every machine has the card, because all have to be restorable from one snapshot.
        *(("-netdev", f"tap,id=net,fd={files.tap}") if files.tap is not None else ()),
        *("-device", f"virtio-net-device,mac={MAC}" + (",netdev=net" if files.tap is not None else "")),
        *("-chardev", f"socket,id=monitor,fd={files.monitor}", "-mon", "chardev=monitor,mode=control"),
        *(_restore_argv() if restore else _boot_argv(files, accel, tsc_khz)),
    ]


def recipe(accel: Accel) -> str:
    """Return a hash of the machines that this module describes: a snapshot of another kind cannot be restored."""
    nowhere = Path("/")
    spec = MachineSpec("machine", nowhere, GuestKernel(nowhere, nowhere), memory_mb=1, vcpus=1, disk_mb=1)
    argv = machine_argv(SYSTEM, spec, accel, Descriptors(*range(7)), shared=True, tsc_khz=None)
    return hashlib.sha256("\0".join(argv).encode()).hexdigest()[:16]


def probe_argv(binary: str, accel: Accel, vmlinuz: int, initramfs: int) -> list[str]:
    """Return the command of a minimal machine, which boots, prints a word and ends."""
    return [
        *base_argv(binary, accel),
        *("-m", "128M", "-kernel", f"/proc/self/fd/{vmlinuz}", "-initrd", f"/proc/self/fd/{initramfs}"),
        *("-append", f"{CONSOLE_ARGS} mcp_sandbox.probe"),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
    ]


def standing_argv(binary: str) -> list[str]:
    """Return the command of a machine that never runs, with its monitor on standard input and output."""
    return [
        *base_argv(binary, Accel.TCG),
        *("-m", "64M", "-S", "-chardev", "stdio,id=monitor,signal=off", "-mon", "chardev=monitor,mode=control"),
    ]


def base_argv(binary: str, accel: Accel) -> list[str]:
    """Return the options that all machines have in common."""
    engine = f"tcg,tb-size={TCG_CACHE_MB}" if accel is Accel.TCG else "kvm"
    return [
        *(binary, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-M", "microvm,acpi=on,rtc=on,pit=on,pic=on,isa-serial=on"),
        *("-accel", engine, "-cpu", TCG_CPU if accel is Accel.TCG else KVM_CPU),
    ]


def _limited(rate: DiskRate, name: str, options: str) -> list[str]:
    """Return a filter in front of a disk that slows it down. It is no part of a saved state."""
    if not rate:
        return []
    totals = {"bps-total": rate.bytes_per_s, "iops-total": rate.iops}
    limits = {limit: value for limit, value in totals.items() if value is not None}
    group = json.dumps({"qom-type": "throttle-group", "id": f"rate-{name}", "limits": limits})
    node = f"driver=throttle,node-name={_LIMITED}{name},throttle-group=rate-{name},file={name},{options}"
    return ["-object", group, "-blockdev", node]


def _boot_argv(files: Descriptors, accel: Accel, tsc_khz: int | None) -> list[str]:
    kernel_args = f"{CONSOLE_ARGS} {LEAN_ARGS}"
    if accel is Accel.TCG:
        kernel_args += f" {EMULATED_ARGS}" + (f" tsc_early_khz={tsc_khz}" if tsc_khz else "")
    return [
        *("-kernel", f"/proc/self/fd/{files.vmlinuz}", "-initrd", f"/proc/self/fd/{files.initramfs}"),
        *("-append", kernel_args),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
    ]


def _restore_argv() -> list[str]:
    # The restored memory contains the kernel. A clone has no console: its guest is not trusted.
    return ["-chardev", "null,id=console", "-serial", "chardev:console", "-incoming", "defer"]
