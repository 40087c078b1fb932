"""From a root file system and something to boot to a frozen machine that has its warm-up behind it."""

from pathlib import Path
from typing import Any

from guest.client import AgentClient
from guest.client.messages import WarmUp
from guest.client.parsing import warm_args
from templates.model import Template
from templates.tools import Tools
from vmm.driver import SnapshotDriver
from vmm.types import MachineSpec

BOOT_TIMEOUT_S = 300.0  # an emulated machine takes 5 s on an idle host, and many times that on a busy one
WARM_TIMEOUT_S = 600.0  # importing pandas and drawing takes 30 s under emulation; a template may well do more


def snapshot_inputs(
    template: Template, warm_up: WarmUp, root_id: str, boot_id: str, fingerprint: str
) -> dict[str, Any]:
    """What a snapshot depends on.

    Ids, not keys: memory that was frozen with one making of a file must never meet another making of it.
    """
    return {
        "root": root_id,
        "boot": boot_id,
        "machine": template.machine.model_dump(),
        "warmup": {**warm_args(warm_up), "code": warm_up.code},
        "driver": fingerprint,
    }


async def make_snapshot(
    tools: Tools, staging: Path, *, template: Template, warm_up: WarmUp, driver: SnapshotDriver, spec: MachineSpec
) -> dict[str, Any]:
    """Start a machine, warm it up, freeze it into `staging`."""
    tools.note("starting a machine")
    async with driver.launch(spec) as machine:
        stream = await machine.connect()
        async with AgentClient.open(stream, timeout_s=BOOT_TIMEOUT_S) as agent:
            tools.note("warming it up")
            await agent.warm(warm_up, timeout_s=WARM_TIMEOUT_S)
            # With the stream still open: an agent that speaks on standard input would end with it.
            tools.note("freezing the machine")
            await driver.snapshot(machine, staging)
    return {"template": template.name, "driver": driver.name}
