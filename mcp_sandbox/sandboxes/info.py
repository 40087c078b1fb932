"""What an owner is told about a sandbox."""

from dataclasses import dataclass

import anyio

from mcp_sandbox.machines.provider import HostFacts, LeaseTimings
from mcp_sandbox.sandboxes.lifecycle import State
from mcp_sandbox.sandboxes.sandbox import Sandbox
from templates.model import Template


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """What an owner may know about a sandbox."""

    id: str
    template: Template
    state: State
    run_id: str | None  # the run that is on
    age_s: float
    expires_in_s: float  # if it is not used
    ends_in_s: float  # in any case
    facts: HostFacts
    timings: LeaseTimings


def info_of(box: Sandbox) -> SandboxInfo:
    """A sandbox as it is now.

    Raises:
        SandboxError: it is over.
    """
    lease = box.last_lease
    if lease is None:
        raise box.error()
    now = anyio.current_time()
    return SandboxInfo(
        id=box.id,
        template=lease.template,
        state=box.state,
        run_id=None if box.runs.current is None else box.runs.current.id,
        age_s=now - box.created,
        expires_in_s=box.expires_in_s(),
        ends_in_s=max(0.0, box.created + box.lifespan.ttl_s - now),
        facts=lease.host,
        timings=lease.timings,
    )
