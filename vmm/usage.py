"""What running processes take from the host."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vmm.errors import MachineLost
from vmm.types import Usage

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GVISOR_MEMORY = "runsc-memory"
BLOCK_BYTES = 512  # what st_blocks counts in


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started and that are still there."""
    with suppress(FileNotFoundError, ProcessLookupError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def with_descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found, new = [pid], children_of(pid)
    while new:
        found += new
        new = [grandchild for child in new for grandchild in children_of(child)]
    return found


def usage(pid: int) -> Usage:
    """What a process and all below it take.

    gVisor has a machine's memory in an anonymous file. It is counted whole: its pages need not be in any address space.
    """
    pids = with_descendants(pid)
    rollups = [rollup for each in pids if (rollup := _rollup(each))]
    if not rollups:
        raise MachineLost("the machine's process has ended")
    if files := _memory_files(pids, GVISOR_MEMORY):
        memory = files + _sum(rollups, "Pss_Anon", "Pss_File")
        private = files + _sum(rollups, "Pss_Anon")
    else:
        memory = _sum(rollups, "Pss")
        private = _sum(rollups, "Private_Dirty", "Private_Clean")
    return Usage(memory_bytes=memory, private_bytes=private, cpu_s=sum(map(_cpu_s, pids)))


def _rollup(pid: int) -> dict[str, int]:
    """Sums over all of a process's memory, in bytes; empty if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {}


def _sum(rollups: Sequence[dict[str, int]], *names: str) -> int:
    return sum(rollup.get(name, 0) for rollup in rollups for name in names)


def _memory_files(pids: Sequence[int], name: str) -> int:
    """Bytes in all anonymous files called `name` that the processes have open."""
    found = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # it was closed just now
                    if str(link.readlink()) == f"/memfd:{name} (deleted)":
                        status = link.stat()
                        found[status.st_ino] = status.st_blocks * BLOCK_BYTES
    return sum(found.values())


def _cpu_s(pid: int) -> float:
    """Processor time of a process and of those children of it that have ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / CLOCK_TICKS_PER_S
    return 0.0
