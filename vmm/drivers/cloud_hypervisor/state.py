"""The state that Cloud Hypervisor saves of a machine, changed so that its copies share their memory.

Cloud Hypervisor reads all memory that the state lists into every machine that it restores. Without that list, the
machine's memory is what its configuration says: here private mappings of a file with the same content. A machine with
more than 3 GB has two of them, around the addresses of devices. One that has booted has no such file, so the state
says of each mapping that it begins where a file does.
"""

import json
from typing import Any

from vmm.errors import SnapshotFailed
from vmm.microvm.api import MAX_FAULT

MEMORY_MANAGER = "memory-manager"


def without_memory(state: bytes, size: int) -> bytes:
    """Return the state without its list of memory, which must be `size` bytes, and with mappings of their file.

    Raises:
        SnapshotFailed: it is not what the versions that we know write.
    """
    try:
        machine = json.loads(state)
        manager = machine["snapshots"][MEMORY_MANAGER]["snapshot_data"]
        inner = json.loads(manager["state"])
        _map_file(inner, size)
        inner["memory_ranges"]["data"] = []
        manager["state"] = json.dumps(inner)
        return json.dumps(machine).encode()
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        why = repr(error)[:MAX_FAULT]  # it quotes what a monitor has written
        raise SnapshotFailed(f"this version of Cloud Hypervisor saves machines in another way: {why}") from error


def _map_file(manager: dict[str, Any], size: int) -> None:
    """Let each mapping have its part of the file. Raises ValueError if that has other parts."""
    saved = [(part["gpa"], part["length"]) for part in manager["memory_ranges"]["data"]]
    mappings = manager["guest_ram_mappings"]
    mapped = [(mapping["gpa"], mapping["size"]) for mapping in mappings]
    if saved != mapped or sum(length for _, length in saved) != size:
        raise ValueError(f"memory at {saved}, not at {mapped}")
    offset = 0
    for mapping in mappings:
        mapping["file_offset"] = offset
        offset += mapping["size"]
