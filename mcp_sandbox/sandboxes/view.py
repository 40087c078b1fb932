"""A live sandbox as its owner sees it."""

import anyio

from mcp_sandbox.sandboxes.sandbox import Sandbox
from mcp_sandbox.views import SandboxView
from templates.model import Template

MAX_CONTENTS_CHARS = 300  # of what models read about a template; `template show` has everything


def contents_of(template: Template) -> str:
    """Return in few words what a template has."""
    text = " ".join(template.description.split())
    return (text if len(text) <= MAX_CONTENTS_CHARS else f"{text[:MAX_CONTENTS_CHARS]}…").rstrip(".")


def view_of(box: Sandbox) -> SandboxView:
    """Return the sandbox as it is now.

    Raises:
        SandboxError: the sandbox is over.
    """
    lease = box.last_lease
    if lease is None:
        raise box.error()
    now = anyio.current_time()
    size, host = lease.template.machine, lease.host
    return SandboxView(
        sandbox_id=box.id,
        template=lease.template.name,
        language=lease.template.language,
        contents=contents_of(lease.template),
        isolation_in_force=str(host),
        isolation=host.isolation,
        driver=host.driver,
        accel=host.accel,
        host=host.name,
        memory_mb=size.memory_mb,
        vcpus=size.vcpus,
        disk_mb=size.disk_mb,
        network=lease.network,
        allow_domains=list(box.network.grant.domains),
        closed_connections=box.network.closed_connections,
        state=box.state,
        run_ids=list(box.runs.active),
        age_s=round(now - box.created, 1),
        expires_in_s=round(box.expires_in_s(), 1),
        ends_in_s=round(max(0.0, box.created + box.lifespan.ttl_s - now), 1),
        queue_ms=round(1000 * lease.timings.queue_s, 1),
        restore_ms=round(1000 * lease.timings.restore_s, 1),
        cold_start=lease.timings.cold,
        missing_protections=list(host.missing_protections),
    )
