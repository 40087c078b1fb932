"""Select the kernel modules a machine needs, in load order."""

import gzip
import lzma
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from templates.tools import StepFailed

# What a machine needs before it has a root file system. A kernel may have any of them built in. If one is missing
# altogether, /init fails in the machine and says so.
NEEDED: tuple[str, ...] = (
    *("virtio_mmio", "virtio_pci", "virtio_blk", "virtio_console", "virtio_net"),
    "vmw_vsock_virtio_transport",  # Firecracker and Cloud Hypervisor have no virtio console for the agent
    *("erofs", "ext4", "overlay"),
)

_UNPACK: dict[str, Callable[[bytes], bytes]] = {".ko": bytes, ".xz": lzma.decompress, ".gz": gzip.decompress}


def load_order(directory: Path) -> list[tuple[str, bytes]]:
    """Return names and contents of the needed modules in `directory` (lib/modules/<version>), dependencies first.

    Dependencies are read from the modules: modules.dep exists only where a kernel package was installed.
    """
    files = {_name(path): path for path in sorted(directory.rglob("*.ko*")) if path.suffix != ".zst"}
    if not files and any(directory.rglob("*.ko.zst")):
        raise StepFailed(f"the modules in {directory} are compressed with zstd; unpack them with: unzstd --rm")
    built_in = _built_in(directory)
    ordered: dict[str, bytes] = {}

    def visit(name: str, ancestors: tuple[str, ...] = ()) -> None:
        if name in ordered or name in ancestors or name not in files:
            return
        content = _read(files[name])
        for needed in _dependencies(content):
            visit(needed, (*ancestors, name))
        ordered[name] = content

    for name in NEEDED:
        if name not in built_in:
            visit(name)
    return list(ordered.items())


def _name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def _read(path: Path) -> bytes:
    return _UNPACK[path.suffix](path.read_bytes())


def _dependencies(module: bytes) -> Iterable[str]:
    """Yield the modules to load first: required ones ("depends") and preferred ones ("softdep pre")."""
    for value in re.findall(rb"\0depends=([^\0]*)\0", module):
        yield from value.decode().replace("-", "_").split(",")
    for value in re.findall(rb"\0softdep=pre: ([^\0]*)\0", module):
        yield from value.decode().partition("post:")[0].replace("-", "_").split()


def _built_in(directory: Path) -> set[str]:
    try:
        lines = (directory / "modules.builtin").read_text().splitlines()
    except FileNotFoundError:
        return set()
    return {_name(Path(line)) for line in lines}
