"""Pack the guest code that runs inside machines: for the initramfs, or as a tar file for drivers without a kernel."""

import hashlib
import io
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import guest
from templates.tools import Tools

AGENT = "agent.tar"
RECIPE = 1  # part of the cache key: raise it when a change here requires a rebuild
# The folder of the guest package that runs on the host. A change there must not make snapshots stale.
_HOST_ONLY = "client"
_CODE = (".py", ".js", ".R")  # also the programs that languages with an interpreter of their own run


def guest_files() -> dict[str, bytes]:
    """Return the files of the guest package that run inside machines, by path."""
    package = Path(guest.__file__).parent
    return {
        f"guest/{path.relative_to(package)}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.suffix in _CODE and _HOST_ONLY not in path.relative_to(package).parts
    }


def digest(content: bytes) -> str:
    """Return the SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def agent_inputs() -> dict[str, Any]:
    """Return the inputs of the agent's archive."""
    return {"recipe": RECIPE, "files": {name: digest(content) for name, content in guest_files().items()}}


async def make_agent(_tools: Tools, staging: Path) -> dict[str, Any]:
    """Write agent.tar to `staging`, for machines that boot no kernel."""
    (staging / AGENT).write_bytes(pack_agent())
    return {}


def pack_agent() -> bytes:
    """Return the guest code as a reproducible tar file."""
    files = guest_files()
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents if parent.name}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(folders):  # by name, so that their modes do not depend on a umask in the machine
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for name, content in files.items():
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(content), 0o644
            tar.addfile(file, io.BytesIO(content))
    return packed.getvalue()
