"""A host with working KVM on a machine without it: QEMU emulates a CPU with virtualization and boots a kernel on it.

It is slow, but it is real KVM: programs in it use /dev/kvm as on any other host. It has cgroups of version 2 only. It
sees our packages, QEMU and the template's image, all read-only; its console is what it reports.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from templates import kernel, kernel_modules
from templates.build import BuiltTemplate
from templates.cpio import CpioArchive
from templates.store import Store
from templates.tools import LoggedTools
from tests.functional.checkout import REPO
from vmm.process import Confinement, find_tool, run_tool, spawn
from vmm.tsc import tsc_khz
from vmm.types import GuestKernel

SYSTEMD = "/usr/lib/systemd/systemd"
USER_UNITS = "usr/lib/systemd/user"
PROGRAMS = (
    *("qemu-system-x86_64", "unshare", "setpriv", "mount", "umount", "pivot_root", "mkfs.ext4"),
    *(SYSTEMD, "systemd-run"),
    "lz4",
)
MONITORS = ("firecracker", "cloud-hypervisor")  # if this host has them, anywhere on its PATH
FIRMWARE = ("bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin", "kvmvapic.bin")
LIBRARIES = (
    *("anyio", "idna", "psutil", "qemu", "typing_extensions"),
    *("h11", "httpcore2", "httpx2", "sniffio", "truststore"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection"),
)
HOST_MODULES = ("virtio_pci", "virtio_blk", "erofs", "overlay", "kvm_amd")
OWN_TIME_KHZ = 1_000_000  # QEMU's counter then ticks once for each nanosecond
KVM_GROUP = 104  # udev gives /dev/kvm to a group; which one does not matter

INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devtmpfs devtmpfs /dev
mount -t cgroup2 cgroup2 /sys/fs/cgroup
while read -r module; do insmod "/modules/$module.ko"; done </modules/order
echo 0 >/sys/module/kvm/parameters/halt_poll_ns  # each turn of a loop that waits takes a microsecond here
chown 0:{KVM_GROUP} /dev/kvm && chmod 660 /dev/kvm
mount -t erofs -o ro /dev/vda /image && mount -t erofs -o ro /dev/vdb /host && mount -t tmpfs tmpfs /tmp
mkdir /tmp/upper /tmp/work
mount -t overlay -o lowerdir=/host/programs:/image,upperdir=/tmp/upper,workdir=/tmp/work overlay /root
mkdir -p /root/host && mount -o move /host /root/host
for place in proc sys dev; do mount -o move "/$place" "/root/$place"; done
mkdir -p /root/dev/shm && mount -t tmpfs tmpfs /root/tmp
# not chroot: the kernel refuses user namespaces in there
exec switch_root /root /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    PYTHONPATH=/host/python PYTHONDONTWRITEBYTECODE=1 /bin/sh /host/run
"""


RUN = """
for script in /host/scripts/*; do python3 "$script"; done
echo b >/proc/sysrq-trigger  # restart, which ends the host
"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What an emulated host has."""

    memory: str = "3G"
    # Of its own time, one nanosecond for each instruction. Then it is not slow, only long: no time limit in it is
    # missed because its CPU is emulated. While nothing runs, time passes as outside: if it passed at once, as with
    # `sleep=off`, the clock would jump by minutes while the CPU waits for a disk.
    own_time: bool = False
    disks: Sequence[Path] = ()  # beside /image and /host; what is written to them is forgotten


async def run_in_emulated_host(
    scripts: Sequence[Path], store: Store, built: BuiltTemplate, scratch: Path, hardware: Hardware = Hardware()
) -> str:
    """Boot the host, run scripts that find guest kernel and image in /host, and return what they printed."""
    tree = scratch / "tree"
    await anyio.to_thread.run_sync(_fill, tree, scripts, built)
    argv = await emulated_host(tree, store, built.root, scratch, hardware)
    async with spawn(argv, confinement=Confinement()) as host:
        await host.wait()
        return host.tail


async def emulated_host(tree: Path, store: Store, image: Path, scratch: Path, hardware: Hardware) -> list[str]:
    """Return the command that boots a host which has `tree` in /host and runs its `run`."""
    found = await _kernel_with_kvm(store)
    await _copy_programs(tree / "programs")
    disk = scratch / "host.erofs"
    await run_tool(["mkfs.erofs", "--all-root", str(disk), str(tree)])
    initramfs = scratch / "initramfs.cpio"
    initramfs.write_bytes(_initramfs(found))
    return _argv(found / kernel.VMLINUZ, initramfs, (image, disk), hardware)


def _argv(vmlinuz: Path, initramfs: Path, disks: Sequence[Path], hardware: Hardware) -> list[str]:
    khz = OWN_TIME_KHZ if hardware.own_time else tsc_khz()
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-M", "q35", "-accel", "tcg", "-cpu", "EPYC,+svm", "-m", hardware.memory),
        *(("-icount", "shift=0", "-rtc", "clock=vm") if hardware.own_time else ()),
        *("-kernel", str(vmlinuz), "-initrd", str(initramfs), "-serial", "stdio"),
        *("-append", f"console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable tsc_early_khz={khz}"),
        *(word for file in disks for word in _drive(file, "readonly=on")),
        *(word for file in hardware.disks for word in _drive(file, "snapshot=on")),
    ]


def _drive(file: Path, writing: str) -> list[str]:
    name = file.stem.replace(".", "-")
    drive = f"if=none,id={name},format=raw,{writing},file={file}"
    return ["-drive", drive, "-device", f"virtio-blk-pci,drive={name}"]


async def _kernel_with_kvm(store: Store) -> Path:
    """The guest kernel with the modules of a host. Kept in the store."""

    async def make(staging: Path) -> dict[str, str]:
        needed, kernel_modules.NEEDED = kernel_modules.NEEDED, HOST_MODULES
        try:
            await kernel.make_kernel(LoggedTools(store.logs / "emulatedhost.log", lambda line: None), staging, None)
        finally:
            kernel_modules.NEEDED = needed
        return {}

    entry = await store.obtain("emulatedhost", {**kernel.kernel_inputs(None), "modules": HOST_MODULES}, make)
    return entry.path


def _fill(tree: Path, scripts: Sequence[Path], built: BuiltTemplate) -> None:
    python = tree / "python"
    for room in ("vmm", "guest"):
        shutil.copytree(REPO / room, python / room)
    for name in LIBRARIES:
        source = _site_packages() / name
        if source.is_dir():
            shutil.copytree(source, python / name)
        else:
            shutil.copy(source.with_suffix(".py"), python)
        for about in _site_packages().glob(f"{name}-*.dist-info"):  # some ask for their own version
            shutil.copytree(about, python / about.name)
    (tree / "run").write_text(RUN)
    (tree / "scripts").mkdir()
    for script in scripts:
        shutil.copy(script, tree / "scripts")
    shutil.copy(built.root, tree / "root.erofs")
    assert isinstance(built.boot, GuestKernel)
    shutil.copy(built.boot.vmlinuz, tree / "vmlinuz")
    shutil.copy(built.boot.initramfs, tree / "initramfs.cpio")


async def _copy_programs(tree: Path) -> None:
    """Copy the host's programs and the libraries they load, to the same paths."""
    files = [Path(found) for program in PROGRAMS if (found := find_tool(program))]
    monitors = [found for program in MONITORS if (found := find_tool(program))]
    lines: list[str] = []
    await run_tool(["ldd", *map(str, files), *monitors], on_line=lines.append)
    files += {Path(path) for path in re.findall(r"(/\S+\.so\S*)", "\n".join(lines))}
    for file in files:
        target = tree / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    for monitor in monitors:
        shutil.copy(monitor, tree / "usr/bin")
    firmware = tree / "usr/share/qemu"
    firmware.mkdir(parents=True)
    for name in FIRMWARE:
        shutil.copy(Path("/usr/share/qemu") / name, firmware)
    if find_tool(SYSTEMD):
        shutil.copytree(Path("/") / USER_UNITS, tree / USER_UNITS, symlinks=True)


def _initramfs(found: Path) -> bytes:
    archive = CpioArchive()
    for directory in ("bin", "dev", "host", "image", "proc", "root", "sys", "tmp"):
        archive.add_directory(directory)
    archive.add_character_device("dev/console", 5, 1)
    archive.add_file("bin/busybox", (found / "busybox").read_bytes(), executable=True)
    for path in sorted((found / "modules").iterdir()):
        archive.add_file(f"modules/{path.name}", path.read_bytes())
    archive.add_file("init", INIT.encode(), executable=True)
    return archive.finish()


def _site_packages() -> Path:
    return next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
