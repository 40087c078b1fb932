"""What running processes take from the host."""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from vmm.errors import MachineLost
from vmm.process_table import with_descendants
from vmm.types import Usage


def usage(pid: int) -> Usage:
    """Measure a process and all below it; raise MachineLost if it has ended."""
    pids = with_descendants(pid)
    memory = memory_of(pids)
    return Usage(
        memory_bytes=memory["Pss"],
        private_bytes=memory["Private_Dirty"] + memory["Private_Clean"],
        cpu_s=cpu_s(pids),
    )


def memory_of(pids: Iterable[int]) -> Counter[str]:
    """Add up what the kernel's `smaps_rollup` says of each process, in bytes; raise MachineLost if all have ended."""
    sums: Counter[str] = Counter()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            sums.update({name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)})
    if not sums:
        raise MachineLost("the machine's process has ended")
    return sums


def cpu_s(pids: Iterable[int]) -> float:
    """Add up the CPU time of processes and of their children that have ended."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
