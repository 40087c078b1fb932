"""The state that Cloud Hypervisor saves of a machine, changed so that its copies share their memory.

Cloud Hypervisor reads all memory that the state lists into every machine that it restores. Without that list, the
machine's memory is what its configuration says: here a private mapping of a file with the same content.
"""

import json
from typing import Any

from vmm.errors import SnapshotFailed

MEMORY_MANAGER = "memory-manager"


def without_memory(state: bytes, size: int) -> bytes:
    """Return the state without its list of memory, which must be `size` bytes in the order of their file.

    Raises:
        SnapshotFailed: it is not what the versions that we know write.
    """
    try:
        machine = json.loads(state)
        manager = machine["snapshots"][MEMORY_MANAGER]["snapshot_data"]
        inner = json.loads(manager["state"])
        _check_layout(inner, size)
        inner["memory_ranges"]["data"] = []
        manager["state"] = json.dumps(inner)
        return json.dumps(machine).encode()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotFailed(f"this version of Cloud Hypervisor saves machines in another way: {error!r}") from error


def _check_layout(manager: dict[str, Any], size: int) -> None:
    """Raise ValueError if memory is not saved where a mapping of the file would look for it."""
    end, saved = 0, []
    for part in manager["memory_ranges"]["data"]:
        saved.append((part["gpa"], part["length"], end))
        end += part["length"]
    mapped = [(part["gpa"], part["size"], part["file_offset"]) for part in manager["guest_ram_mappings"]]
    if saved != mapped or end != size:
        raise ValueError(f"memory at {saved}, not at {mapped}")
