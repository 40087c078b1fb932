"""Where a machine writes files that it keeps in memory, and how much fits into each place.

Files count against the machine's memory. Together the places hold hardly more than that, so a machine whose places are
full can still run a command that removes files.
"""

from vmm.types import MachineSpec

# Shares of the machine's memory. The names are those of the machine, not of the host.
WORKSPACE_SHARE, TMP_SHARE, SHARED_MEMORY_SHARE, VAR_TMP_SHARE = 2, 4, 8, 16
RUN_MB = 16  # the agent's code and state
OPEN_TO_ALL = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108


def scratch_mb(spec: MachineSpec) -> dict[str, int]:
    """Return the size of each tmpfs that a machine writes to."""
    workspace = max(1, min(spec.disk_mb, spec.memory_mb // WORKSPACE_SHARE))
    return {
        "/workspace": workspace,
        "/tmp": max(1, spec.memory_mb // TMP_SHARE),  # noqa: S108
        "/var/tmp": max(1, spec.memory_mb // VAR_TMP_SHARE),  # noqa: S108
        "/run": RUN_MB,
        "/dev/shm": max(1, spec.memory_mb // SHARED_MEMORY_SHARE),  # noqa: S108
    }


def mode_of(place: str) -> str:
    """Return the access mode of a place."""
    return "1777" if place in OPEN_TO_ALL else "0755"
