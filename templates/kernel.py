"""The Linux kernel of machines, and the first files it sees.

Two entries in the store: the kernel with its modules and a busybox, which takes a download, and the initramfs,
which also carries our own code and takes a moment; so a change of the agent never fetches anything.
"""

import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from templates import apt
from templates.cpio import CpioArchive
from templates.errors import UnusableKernel
from templates.guest_code import digest, guest_files
from templates.modules import load_order
from templates.packages import PrivateApt
from templates.tools import StepFailed, Tools

VMLINUZ = "vmlinuz"
INITRAMFS = "initramfs.cpio"
RECIPE = 2  # raise it when a change here must reach machines that are already built
SETTING = "MCP_SANDBOX_GUEST_KERNEL"

# Debian's kernel for cloud machines has all a microVM needs and little else.
_PACKAGES = {"x86_64": "linux-image-cloud-amd64"}
# All that /init calls.
_APPLETS = (
    "ash",
    "cat",
    "chown",
    "cp",
    "hostname",
    "ifconfig",
    "insmod",
    "ln",
    "mkdir",
    "mount",
    "reboot",
    "switch_root",
)
READABLE = 0o644  # whatever the umask is: a machine's process is another user than the one who builds
_SCRIPTS = Path(__file__).parent / "initramfs"


@dataclass(frozen=True, slots=True)
class OwnKernel:
    """A kernel the user brought, for hosts on which only that one boots."""

    vmlinuz: Path
    modules: Path | None = None  # its lib/modules/<version>; None if all that is needed is built in


def kernel_inputs(own: OwnKernel | None) -> dict[str, Any]:
    """What the kernel entry depends on; raises UnusableKernel."""
    if own is None:
        package = _PACKAGES.get(platform.machine())
        return {"recipe": RECIPE, "package": package, "suite": apt.host_codename()}
    try:
        vmlinuz = digest(own.vmlinuz.read_bytes())
        modules = load_order(own.modules) if own.modules else []
    except (OSError, StepFailed) as error:
        raise UnusableKernel(f"the guest kernel cannot be used: {error}; mend {SETTING} or unset it") from error
    return {
        "recipe": RECIPE,
        "vmlinuz": vmlinuz,
        "modules": [[name, digest(content)] for name, content in modules],
    }


async def make_kernel(tools: Tools, staging: Path, own: OwnKernel | None) -> dict[str, Any]:
    """Put vmlinuz, busybox and modules/ into `staging`."""
    details = await _fetch_debian_kernel(tools, staging) if own is None else _take_own_kernel(staging, own)
    (staging / VMLINUZ).chmod(READABLE)
    return details


def _take_own_kernel(staging: Path, own: OwnKernel) -> dict[str, Any]:
    busybox = shutil.which("busybox")
    if busybox is None or b"/ld-linux" in Path(busybox).read_bytes():  # the name of the dynamic loader
        raise StepFailed("a kernel of your own needs a statically linked busybox (Debian: busybox-static)")
    shutil.copyfile(busybox, staging / "busybox")
    shutil.copyfile(own.vmlinuz, staging / VMLINUZ)
    _save_modules(staging, own.modules)
    return {"own": str(own.vmlinuz)}


def initramfs_inputs(kernel_id: str) -> dict[str, Any]:
    """What the initramfs depends on; `kernel_id` tells two downloads of the same package apart."""
    ours = {**_scripts(), **guest_files()}
    return {
        "recipe": RECIPE,
        "kernel": kernel_id,
        "files": {name: digest(content) for name, content in ours.items()},
    }


async def make_initramfs(_tools: Tools, staging: Path, kernel: Path) -> dict[str, Any]:
    """Put initramfs.cpio into `staging`."""
    (staging / INITRAMFS).write_bytes(pack_initramfs(kernel))
    (staging / INITRAMFS).chmod(READABLE)
    return {}


def pack_initramfs(kernel: Path) -> bytes:
    """The first file system of a machine: what the kernel needs, then our own code in a second archive."""
    system = CpioArchive()
    for directory in ("bin", "dev", "disk", "image", "proc", "root", "sys"):
        system.add_directory(directory)
    system.add_character_device("dev/console", 5, 1)
    system.add_file("bin/busybox", (kernel / "busybox").read_bytes(), executable=True)
    for applet in _APPLETS:
        system.add_link(f"bin/{applet}", "busybox")
    for path in sorted((kernel / "modules").iterdir()):
        system.add_file(f"modules/{path.name}", path.read_bytes())
    ours = CpioArchive()
    for name, content in {**_scripts(), **guest_files()}.items():
        ours.add_file(name, content, executable=name == "init")
    return system.finish() + ours.finish()


def _scripts() -> dict[str, bytes]:
    return {name: (_SCRIPTS / name).read_bytes() for name in ("init", "pid1")}


async def _fetch_debian_kernel(tools: Tools, staging: Path) -> dict[str, Any]:
    package = _PACKAGES.get(platform.machine())
    sources = apt.sources_for(suite) if (suite := apt.host_codename()) else None
    if package is None or sources is None:
        raise StepFailed(
            "only on x86-64 Debian with its own package sources can the guest kernel be fetched; "
            f"set {SETTING} to the path of a vmlinuz of your own"
        )
    work = staging / "work"
    packages = PrivateApt(tools, work, sources)
    await packages.update()
    newest = re.search(r"Depends: (linux-image-\S+)", await packages.depends(package))
    if newest is None:
        raise StepFailed(f"{package} names no kernel")
    names = await packages.unpack(newest.group(1), "busybox-static")
    shutil.move(packages.find("boot/vmlinuz-*"), staging / VMLINUZ)
    shutil.move(packages.find("bin/busybox", "usr/bin/busybox"), staging / "busybox")
    _save_modules(staging, packages.find("lib/modules/*", "usr/lib/modules/*"))
    shutil.rmtree(work)
    return {"packages": names}


def _save_modules(staging: Path, directory: Path | None) -> None:
    target = staging / "modules"
    target.mkdir()
    modules = load_order(directory) if directory else []
    for name, content in modules:
        (target / f"{name}.ko").write_bytes(content)
    (target / "order").write_text("".join(f"{name}\n" for name, _ in modules))
