"""The size that a sandbox asks for, within the operator's limits."""

import os

from mcp_sandbox.config import LimitSettings
from mcp_sandbox.errors import BadRequest
from templates.model import MachineSize

LEAST_MEMORY_MB = 128


def size_within(limits: LimitSettings, own: MachineSize, memory_mb: int | None, cpus: int | None) -> MachineSize:
    """Return the size of a machine: its template's `own`, with what is asked for instead.

    Raises:
        BadRequest: it exceeds the limits. A template's own size is always allowed.
    """
    available = len(os.sched_getaffinity(0))
    most_cpus = available if limits.sandbox_cpus is None else min(available, limits.sandbox_cpus)
    wanted = {
        "memory_mb": _within("memory_mb", memory_mb, own.memory_mb, LEAST_MEMORY_MB, limits.sandbox_memory_mb),
        "vcpus": _within("cpus", cpus, own.vcpus, 1, most_cpus),
    }
    return own.model_copy(update=wanted)


def _within(name: str, wanted: int | None, own: int, least: int, most: int) -> int:
    if wanted is None or wanted == own:
        return own
    if not least <= wanted <= most:
        also = f", or {own}, which the template has" if own > most else ""
        raise BadRequest(f"{name} must be at least {least} and at most {most}{also}.")
    return wanted
