"""Start a machine, warm it up, and take its snapshot.

The client of agents is imported late: a server greets its own client before it needs that.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from guest.agent import online
from guest.languages import language as facts
from guest.places import WORKSPACE
from templates.image_config import ImageConfig
from templates.model import Template
from templates.tools import Tools
from vmm.driver import SnapshotDriver
from vmm.types import MachineSpec, NetworkMode

if TYPE_CHECKING:
    from guest.client.messages import Service, WarmUp

BOOT_TIMEOUT_S = 300.0  # an emulated machine takes 5 s on an idle host, and many times that on a busy one
WARM_TIMEOUT_S = 600.0  # importing pandas and drawing takes 30 s under emulation; a template may do more
_SHELL = ("/bin/sh", "-c")


def warm_up_of(template: Template, image: ImageConfig) -> "WarmUp":
    """Return a template's warm-up. Settings in template.toml override the image's."""
    from guest.client.messages import WarmUp

    wanted = template.warmup.rehearsal
    return WarmUp(
        language=template.language,
        code=template.warmup.code,
        env={**image.env, **template.env},
        service=_service_of(template, image),
        user_namespaces=template.user_namespaces,
        rehearsal=wanted if wanted is not None else facts(template.language).rehearsal or "",
    )


def _service_of(template: Template, image: ImageConfig) -> "Service | None":
    from guest.client.messages import Service

    wanted = template.service
    if wanted is None:
        return None
    # It starts before anyone knows the mode of its sandbox. Without a network nothing listens at the proxy's address; a
    # device would be of no use to a service that looks for a proxy.
    proxy = online.VARIABLES if template.network is NetworkMode.PROXY else {}
    return Service(
        command=(*_SHELL, wanted.start_cmd) if wanted.start_cmd else image.command,
        ready=(*_SHELL, wanted.ready_cmd),
        env={**proxy, **wanted.env},
        cwd=wanted.cwd or image.workdir or WORKSPACE,
        ready_timeout_s=wanted.ready_timeout_s,
    )


def size_inputs(template: Template) -> dict[str, Any]:
    """Return what a snapshot depends on of the machine's size. Firecracker saves limits on disks with the machine."""
    return template.machine.model_dump(exclude_none=True)  # an option that is not used makes no snapshot stale


def snapshot_inputs(
    template: Template, warm_up: "WarmUp", root_id: str, boot_id: str, fingerprint: str
) -> dict[str, Any]:
    """Return the inputs of a snapshot.

    Root and boot files count by id, not by key: memory must only be restored with the very files it was saved with.
    """
    from guest.client.parsing import warm_args

    return {
        "root": root_id,
        "boot": boot_id,
        "machine": size_inputs(template),
        "warmup": {**warm_args(warm_up), "code": warm_up.code},
        "driver": fingerprint,
    }


async def make_snapshot(
    tools: Tools, staging: Path, *, template: Template, warm_up: "WarmUp", driver: SnapshotDriver, spec: MachineSpec
) -> dict[str, Any]:
    """Start a machine, warm it up, and save its state to `staging`."""
    from guest.client import AgentClient

    tools.note("starting a machine")
    async with driver.launch(spec) as machine:
        stream = await machine.connect()
        async with AgentClient.open(stream, timeout_s=BOOT_TIMEOUT_S) as agent:
            tools.note("warming it up")
            await agent.warm(warm_up, timeout_s=WARM_TIMEOUT_S)
            # The stream must still be open: an agent on standard input exits when it is closed.
            tools.note("taking the snapshot")
            await driver.snapshot(machine, staging)
    return {"template": template.name, "driver": driver.name}
