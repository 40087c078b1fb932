"""The model of this host's CPU. A snapshot that was taken under KVM only continues on the same model.

Clouds give different models the same name, and hide instructions of some. So a model is its name, its numbers, and the
instructions that programs can use.
"""

import hashlib
import re
from itertools import takewhile
from pathlib import Path

from vmm.errors import SnapshotFailed
from vmm.trust import read_trusted
from vmm.types import Snapshot

# The kernel's names of instructions. Its other flags are also about itself and change with its version.
INSTRUCTIONS = re.compile(
    "3dnow|abm|adx|aes|amx|apx|avx|bmi|clflush|clwb|clzero|cx16|erms|f16c|fma|fsgsbase|fsrm|fxsr|gfni|hle|invpcid|la57|"
    "lahf|mmx|mov|mpx|osxsave|pclmul|pku|popcnt|rdpid|rdrand|rdseed|rdtscp|rtm|serialize|sha|sse|ssse|tbm|umip|vaes|"
    "vpclmul|waitpkg|xop|xsave"
)
FILE = "cpu_model"  # in the directory of a snapshot


def model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the host's CPU."""
    with cpuinfo.open() as lines:  # only about the first CPU: to list hundreds takes the kernel milliseconds
        first = (line.partition(":") for line in takewhile(str.strip, lines))
        facts = {name.strip(): value.strip() for name, _, value in first}
    numbers = "-".join(facts.get(name, "?") for name in ("cpu family", "model", "stepping"))
    instructions = sorted(flag for flag in facts.get("flags", "").split() if INSTRUCTIONS.match(flag))
    digest = hashlib.sha256(" ".join(instructions).encode()).hexdigest()[:8]
    return f"{facts.get('model name', 'unknown')}, {numbers}, instructions {digest}"


def record(folder: Path) -> None:
    """Write down on which model a snapshot was taken."""
    (folder / FILE).write_text(model())


def check(snapshot: Snapshot) -> None:
    """Raise SnapshotFailed if a snapshot was taken on another model, OSError if it cannot be read."""
    taken = read_trusted(snapshot.path / FILE).decode(errors="replace")
    if taken != (here := model()):
        problem = f"the snapshot was taken on a CPU of another model ({taken}), this host has {here}"
        raise SnapshotFailed(f"{problem}: build the template here")
