"""The part of our own code that runs inside machines: an initramfs carries it, or an archive of its own does."""

import hashlib
import io
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import guest
from templates.tools import Tools

AGENT = "agent.tar"
RECIPE = 1  # raise it when a change here must reach machines that are already built
# A folder of the guest package: the host's end of the wire. Machines have no use for it, and a change of it must
# not make their snapshots stale.
_HOST_ONLY = "client"


def guest_files() -> dict[str, bytes]:
    """The part of the guest package that runs inside machines, by path."""
    package = Path(guest.__file__).parent
    return {
        f"guest/{path.relative_to(package)}": path.read_bytes()
        for path in sorted(package.rglob("*.py"))
        if _HOST_ONLY not in path.relative_to(package).parts
    }


def digest(content: bytes) -> str:
    """What tells one content from another."""
    return hashlib.sha256(content).hexdigest()


def agent_inputs() -> dict[str, Any]:
    """What the agent's archive depends on."""
    return {"recipe": RECIPE, "files": {name: digest(content) for name, content in guest_files().items()}}


async def make_agent(_tools: Tools, staging: Path) -> dict[str, Any]:
    """Put agent.tar into `staging`, for machines that boot no kernel."""
    (staging / AGENT).write_bytes(pack_agent())
    (staging / AGENT).chmod(0o644)
    return {}


def pack_agent() -> bytes:
    """The guest package as a tar file that is the same each time."""
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
