"""Make the guest kernel and its initramfs.

They are two entries in the store: the kernel with its modules and busybox is downloaded; the initramfs also contains
the guest code and takes a moment. So a change of the guest code downloads nothing.
"""

import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from templates import apt_sources
from templates.cpio import CpioArchive
from templates.errors import UnusableKernel
from templates.guest_code import digest, guest_files
from templates.kernel_modules import load_order
from templates.private_apt import PrivateApt
from templates.removal import remove_tree
from templates.tools import StepFailed, Tools

VMLINUZ = "vmlinuz"
INITRAMFS = "initramfs.cpio"
RECIPE = 5  # part of the cache key: raise it when a change here requires a rebuild
SETTING = "MCP_SANDBOX_GUEST_KERNEL"

# Debian's cloud kernel has everything a microVM needs and little else.
_PACKAGES = {"x86_64": "linux-image-cloud-amd64"}
# The commands that /init uses.
_APPLETS = "ash cat chown cp hostname ifconfig insmod ln mkdir mount reboot switch_root"
READABLE = 0o644  # regardless of the umask: machines run as a different user than builds
_SCRIPTS = Path(__file__).parent / "initramfs"


@dataclass(frozen=True, slots=True)
class OwnKernel:
    """A kernel that the user provides, for hosts on which only that one boots."""

    vmlinuz: Path
    modules: Path | None = None  # its lib/modules/<version>; None if it has everything built in


def kernel_inputs(own: OwnKernel | None) -> dict[str, Any]:
    """Return the inputs of the kernel entry; raises UnusableKernel."""
    if own is None:
        package = _PACKAGES.get(platform.machine())
        return {"recipe": RECIPE, "package": package, "suite": apt_sources.host_codename()}
    try:
        vmlinuz = digest(own.vmlinuz.read_bytes())
        modules = load_order(own.modules) if own.modules else []
    except (OSError, StepFailed) as error:
        raise UnusableKernel(f"the guest kernel cannot be used: {error}; correct {SETTING} or unset it") from error
    return {
        "recipe": RECIPE,
        "vmlinuz": vmlinuz,
        "modules": [[name, digest(content)] for name, content in modules],
    }


async def make_kernel(tools: Tools, staging: Path, own: OwnKernel | None) -> dict[str, Any]:
    """Write vmlinuz, busybox and modules/ to `staging`."""
    details = await _fetch_debian_kernel(tools, staging) if own is None else _take_own_kernel(staging, own)
    (staging / VMLINUZ).chmod(READABLE)
    return details


def _take_own_kernel(staging: Path, own: OwnKernel) -> dict[str, Any]:
    busybox = shutil.which("busybox")
    if busybox is None or b"/ld-linux" in Path(busybox).read_bytes():  # the dynamic loader
        raise StepFailed("a custom kernel needs a statically linked busybox on the host (Debian: busybox-static)")
    shutil.copyfile(busybox, staging / "busybox")
    shutil.copyfile(own.vmlinuz, staging / VMLINUZ)
    _save_modules(staging, own.modules)
    return {"own": str(own.vmlinuz)}


def initramfs_inputs(kernel_id: str) -> dict[str, Any]:
    """Return the inputs of the initramfs. `kernel_id` differs between two downloads of the same package."""
    ours = {**_scripts(), **guest_files()}
    return {
        "recipe": RECIPE,
        "kernel": kernel_id,
        "files": {name: digest(content) for name, content in ours.items()},
    }


async def make_initramfs(_tools: Tools, staging: Path, kernel: Path) -> dict[str, Any]:
    """Write initramfs.cpio to `staging`."""
    (staging / INITRAMFS).write_bytes(pack_initramfs(kernel))
    (staging / INITRAMFS).chmod(READABLE)
    return {}


def pack_initramfs(kernel: Path) -> bytes:
    """Return the initramfs: busybox and modules in one archive, the guest code in a second one."""
    system = CpioArchive()
    for directory in ("bin", "dev", "disk", "image", "proc", "root", "sys"):
        system.add_directory(directory)
    system.add_character_device("dev/console", 5, 1)
    system.add_file("bin/busybox", (kernel / "busybox").read_bytes(), executable=True)
    for applet in _APPLETS.split():
        system.add_link(f"bin/{applet}", "busybox")
    for path in sorted((kernel / "modules").iterdir()):
        system.add_file(f"modules/{path.name}", path.read_bytes())
    ours = CpioArchive()
    for name, content in {**_scripts(), **guest_files()}.items():
        ours.add_file(name, content, executable=name == "init")
    return system.finish() + ours.finish()


def _scripts() -> dict[str, bytes]:
    return {name: (_SCRIPTS / name).read_bytes() for name in ("init", "pid1")}


def kernel_sources() -> str:
    """Return the apt sources of the guest kernel."""
    sources = apt_sources.sources_for(suite) if (suite := apt_sources.host_codename()) else None
    if platform.machine() not in _PACKAGES or sources is None:
        raise StepFailed(
            "the guest kernel can only be downloaded on x86-64 Debian with Debian's package sources; "
            f"set {SETTING} to the path of your own vmlinuz"
        )
    return sources


async def kernel_packages(packages: PrivateApt) -> tuple[str, ...]:
    """Return the packages to download: the newest kernel and a static busybox."""
    package = _PACKAGES[platform.machine()]
    newest = re.search(r"Depends: (linux-image-\S+)", await packages.depends(package))
    if newest is None:
        raise StepFailed(f"{package} depends on no kernel package")
    return newest.group(1), "busybox-static"


async def _fetch_debian_kernel(tools: Tools, staging: Path) -> dict[str, Any]:
    work = staging / "work"
    packages = PrivateApt(tools, work, kernel_sources())
    await packages.update()
    names = await packages.unpack(*await kernel_packages(packages))
    shutil.move(packages.find("boot/vmlinuz-*"), staging / VMLINUZ)
    shutil.move(packages.find("bin/busybox", "usr/bin/busybox"), staging / "busybox")
    _save_modules(staging, packages.find("lib/modules/*", "usr/lib/modules/*"))
    remove_tree(work)
    return {"packages": names}


def _save_modules(staging: Path, directory: Path | None) -> None:
    target = staging / "modules"
    target.mkdir()
    modules = load_order(directory) if directory else []
    for name, content in modules:
        (target / f"{name}.ko").write_bytes(content)
    (target / "order").write_text("".join(f"{name}\n" for name, _ in modules))
