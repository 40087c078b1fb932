"""Cgroups that the user's systemd creates for us, on hosts where an ordinary user may not create any.

tests/functional tries them on an emulated host, which has a user's systemd, but no system-wide one.
"""

import math
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vmm.process import find_tool, probe_child
from vmm.types import CPU_PERIOD_US, Limits

TRIAL_S = 5.0  # systemd creates a scope in 20 ms
RUNTIME = "XDG_RUNTIME_DIR"
CGROUPS = Path("/sys/fs/cgroup")  # systemd mounts them nowhere else
SHOW_CONTROLLERS = f'cat "{CGROUPS}$(sed -n s/^0:://p /proc/self/cgroup)/cgroup.controllers"'


def find_manager(environment: Mapping[str, str]) -> Path | None:
    """Return the runtime directory of the user's systemd, or None if there is none."""
    if not find_tool("systemd-run"):
        return None
    place = Path(environment.get(RUNTIME) or f"/run/user/{os.geteuid()}")
    return place if (place / "systemd/private").exists() or (place / "bus").exists() else None


def controllers(manager: Path) -> set[str]:
    """Start a process in a scope and return the controllers that it sees; nothing if that fails."""
    limits = Limits(memory_bytes=64 << 20, cpus=1, pids=16)
    argv = scope_argv(manager, f"mcp-sandbox-{os.getpid()}-probe", limits, ["sh", "-c", SHOW_CONTROLLERS])
    with suppress(OSError, subprocess.TimeoutExpired), probe_child(argv) as child:
        return set(child.communicate(timeout=TRIAL_S)[0].decode().split())
    return set()


def scope_argv(manager: Path, unit: str, limits: Limits, argv: list[str]) -> list[str]:
    """Return a command that becomes `argv` in a new scope. It stays the same process, with its rlimits."""
    values = {
        "MemoryMax": limits.memory_bytes,
        "MemorySwapMax": None if limits.memory_bytes is None else 0,
        "CPUQuota": None if math.isinf(limits.cpus) else f"{limits.cpus:.0%}",
        "CPUQuotaPeriodSec": None if math.isinf(limits.cpus) else f"{CPU_PERIOD_US}us",
        "TasksMax": limits.pids,
    }
    properties = [f"--property={name}={value}" for name, value in values.items() if value is not None]
    return [
        *("env", f"{RUNTIME}={manager}", "systemd-run", "--user", "--scope", "--quiet", "--collect"),
        *(f"--unit={unit}", *properties, "--"),
        *("env", f"--unset={RUNTIME}", *argv),
    ]


def find_scope(unit: str) -> list[Path]:
    """Return the cgroup directory of a scope, if the scope exists."""
    user = os.geteuid()
    return list(CGROUPS.glob(f"user.slice/user-{user}.slice/user@{user}.service/*/{unit}.scope"))
