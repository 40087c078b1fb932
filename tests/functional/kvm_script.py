"""Runs inside the emulated host: the qemu driver from probe to restored machine, under real KVM."""

import json
import os
from pathlib import Path

import anyio

from guest.client import AgentClient
from guest.client.messages import Identity, Output, RunCode, WarmUp
from vmm import probe
from vmm.driver import DriverConfig, SnapshotDriver, load_driver
from vmm.probe import kvm
from vmm.types import GuestKernel, MachineSpec

HOST = Path("/host")
SLOW_S = 600.0  # everything here is emulated, and the host may be busy


async def main() -> None:
    probe.KVM_DEADLINE_S = SLOW_S  # for hosts that do not emulate their CPU
    kernel = GuestKernel(HOST / "vmlinuz", HOST / "initramfs.cpio")
    driver = load_driver("qemu", DriverConfig(run_dir=Path("/tmp/run"), cache_dir=Path("/tmp/cache"), kernel=kernel))
    assert isinstance(driver, SnapshotDriver)
    tiny = await kvm(Path("/tmp/cache"))
    report("tiny guest", usable=tiny.usable, reason=tiny.reason)
    verdict = await driver.probe()
    report("probe", accel=verdict.accel, reason=verdict.reason, limits=verdict.missing_protections)
    frozen = Path("/tmp/snapshot")
    frozen.mkdir()
    async with (
        driver.launch(spec("cold", kernel)) as machine,
        AgentClient.open(await machine.connect(), timeout_s=SLOW_S) as agent,
    ):
        await agent.warm(WarmUp(language="shell"), timeout_s=SLOW_S)  # importing IPython would take minutes
        snapshot = await driver.snapshot(machine, frozen)
    identity = Identity(hostname="sandbox-kvm", machine_id="1" * 32, entropy=os.urandom(64))
    async with driver.restore(snapshot, spec("clone", kernel)) as machine:
        process = Path(f"/proc/{machine.pid}")  # type: ignore[attr-defined]
        status, group = (process / "status").read_text(), (process / "cgroup").read_text().strip()
        async with AgentClient.open(await machine.connect(), timeout_s=SLOW_S, identity=identity) as agent:
            assert agent.refreshed is not None
            async with agent.run(RunCode("echo $(hostname) $((6 * 7))", "command")) as run:
                shown = "".join([event.text async for event in run if isinstance(event, Output)])
    await driver.aclose()
    uid = next(line.split()[1] for line in status.splitlines() if line.startswith("Uid"))
    report("restored", shown=shown, uid=uid, group=group, skew_s=agent.refreshed.clock_skew_s)


def spec(name: str, kernel: GuestKernel) -> MachineSpec:
    return MachineSpec(name, HOST / "root.erofs", kernel, memory_mb=512, vcpus=1, disk_mb=64)


def report(what: str, **facts: object) -> None:
    print("KVM", json.dumps({"what": what, **facts}), flush=True)


anyio.run(main)
