"""Runs inside the emulated host: ten clones of one snapshot with each driver under KVM, to compare the drivers.

Absolute times mean nothing there.
"""

import json
import os
import statistics
import time
import traceback
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from guest.client import AgentClient
from guest.client.messages import Display, Identity, RunCode, WarmUp
from vmm import probe
from vmm.driver import DriverConfig, Machine, SnapshotDriver, load_driver
from vmm.process import find_tool
from vmm.types import GuestKernel, MachineSpec, Snapshot

HOST = Path("/host")
SLOW_S = 600.0  # everything here is emulated, and the host may be busy
DRIVERS = {"qemu": "qemu-system-x86_64", "firecracker": "firecracker", "cloud-hypervisor": "cloud-hypervisor"}
KERNEL = GuestKernel(HOST / "vmlinuz", HOST / "initramfs.cpio")
CLONES = 10


async def main() -> None:
    os.umask(0o077)  # as the product does: machines of other users must not need the files of the home
    probe.KVM_DEADLINE_S = SLOW_S  # for hosts that do not emulate their CPU
    for name, program in DRIVERS.items():
        if find_tool(program):
            try:
                await measure(name)
            except Exception:
                report(name, error=traceback.format_exc()[-3000:])


async def measure(name: str) -> None:
    folder = Path("/tmp") / name
    driver = load_driver(name, DriverConfig(run_dir=folder / "run", cache_dir=folder / "cache", kernel=KERNEL))
    assert isinstance(driver, SnapshotDriver)
    verdict = await driver.probe()
    saved = folder / "saved"
    saved.mkdir(parents=True)
    async with (
        driver.launch(spec("cold")) as machine,
        AgentClient.open(await machine.connect(), timeout_s=SLOW_S) as agent,
    ):
        await agent.warm(WarmUp(code="import numpy"), timeout_s=SLOW_S)
        snapshot = await driver.snapshot(machine, saved)
    async with AsyncExitStack() as stack:
        seconds, machines = [], []
        for number in range(CLONES):
            began = time.monotonic()
            machines.append(await restored(stack, driver, snapshot, f"clone-{number}"))
            seconds.append(time.monotonic() - began)
        used = [await machine.usage() for machine in machines]
    await driver.aclose()
    report(
        name,
        version=verdict.version,
        accel=verdict.accel,
        first_result_s=statistics.median(seconds[1:]),  # the first clone loads the snapshot's memory
        pss_mb=statistics.mean(one.memory_bytes for one in used) / 2**20,
        private_mb=statistics.mean(one.private_bytes for one in used) / 2**20,
    )


async def restored(stack: AsyncExitStack, driver: SnapshotDriver, snapshot: Snapshot, name: str) -> Machine:
    """Start a clone and wait for its first result."""
    machine = await stack.enter_async_context(driver.restore(snapshot, spec(name)))
    identity = Identity(hostname=name, machine_id=os.urandom(16).hex(), entropy=os.urandom(64))
    opening = AgentClient.open(await machine.connect(), timeout_s=SLOW_S, identity=identity)
    agent = await stack.enter_async_context(opening)
    async with agent.run(RunCode(code="import numpy; int(numpy.arange(10).sum())")) as events:
        assert [event.data["text/plain"] async for event in events if isinstance(event, Display)] == ["45"]
    return machine


def spec(name: str) -> MachineSpec:
    return MachineSpec(name, HOST / "root.erofs", KERNEL, memory_mb=512, vcpus=1, disk_mb=64)


def report(driver: str, **facts: object) -> None:
    print("CLONES", json.dumps({"what": driver, **facts}), flush=True)


anyio.run(main)
