"""Control groups that the user's systemd makes for us, on hosts where an ordinary user may make none.

The emulated host of tests/functional shows that it works; it has a user's systemd, but none above that one.
"""

import math
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vmm.process import bystander, find_tool
from vmm.types import Limits

TRIAL_S = 5.0  # systemd makes a scope in 20 ms
RUNTIME = "XDG_RUNTIME_DIR"
GROUPS = Path("/sys/fs/cgroup")  # systemd mounts them nowhere else
SHOW_CONTROLLERS = f'cat "{GROUPS}$(sed -n s/^0:://p /proc/self/cgroup)/cgroup.controllers"'


def find_manager(environment: Mapping[str, str]) -> Path | None:
    """Where the user's systemd can be reached; None if there is none."""
    if not find_tool("systemd-run"):
        return None
    place = Path(environment.get(RUNTIME) or f"/run/user/{os.geteuid()}")
    return place if (place / "systemd/private").exists() or (place / "bus").exists() else None


def controllers(manager: Path) -> set[str]:
    """What a scope really is under, asked of a process in one; nothing if none could be made."""
    ceilings = Limits(memory_bytes=64 << 20, cpus=1, pids=16)
    argv = scope_argv(manager, f"mcp-sandbox-{os.getpid()}-probe", ceilings, ["sh", "-c", SHOW_CONTROLLERS])
    with suppress(OSError, subprocess.TimeoutExpired), bystander(argv) as child:
        return set(child.communicate(timeout=TRIAL_S)[0].decode().split())
    return set()


def scope_argv(manager: Path, unit: str, limits: Limits, argv: list[str]) -> list[str]:
    """A command that becomes `argv` in a scope of its own. It stays the same process, with all that was set on it."""
    ceilings = {
        "MemoryMax": limits.memory_bytes,
        "MemorySwapMax": None if limits.memory_bytes is None else 0,
        "CPUQuota": None if math.isinf(limits.cpus) else f"{limits.cpus:.0%}",
        "TasksMax": limits.pids,
    }
    properties = [f"--property={name}={value}" for name, value in ceilings.items() if value is not None]
    return [
        *("env", f"{RUNTIME}={manager}", "systemd-run", "--user", "--scope", "--quiet", "--collect"),
        *(f"--unit={unit}", *properties, "--"),
        *("env", f"--unset={RUNTIME}", *argv),
    ]


def find_scope(unit: str) -> list[Path]:
    """The directory of a scope that is there."""
    user = os.geteuid()
    return list(GROUPS.glob(f"user.slice/user-{user}.slice/user@{user}.service/*/{unit}.scope"))
