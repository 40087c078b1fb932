"""The model of this host's CPU. A snapshot that was taken under KVM only continues on the same model."""

import re
from pathlib import Path

from vmm.errors import SnapshotFailed
from vmm.trust import read_trusted
from vmm.types import Snapshot

FILE = "cpu_model"  # in the directory of a snapshot


def model() -> str:
    """Return the model of the host's CPU."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def record(folder: Path) -> None:
    """Write down on which model a snapshot was taken."""
    (folder / FILE).write_text(model())


def check(snapshot: Snapshot) -> None:
    """Raise SnapshotFailed if a snapshot was taken on another model, OSError if it cannot be read."""
    taken = read_trusted(snapshot.path / FILE).decode(errors="replace")
    if taken != (here := model()):
        problem = f"the snapshot was taken on a CPU of another model ({taken}), this host has {here}"
        raise SnapshotFailed(f"{problem}: build the template here")
