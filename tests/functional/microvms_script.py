"""Runs inside the emulated host: drivers that need real KVM, from probe to a copy of a copy."""

import json
import os
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio

from guest.client import AgentClient
from guest.client.messages import Display, Finished, Identity, RunCode, WarmUp
from vmm import probe
from vmm.driver import DriverConfig, Machine, SnapshotDriver, load_driver
from vmm.errors import MachineLost
from vmm.process import find_tool, run_tool
from vmm.types import GuestKernel, MachineSpec, Snapshot

HOST = Path("/host")
SLOW_S = 600.0  # everything here is emulated, and the host may be busy
DISK = Path("/srv")  # what Firecracker saves to memory would count as the machine's
DRIVERS = ("firecracker", "cloud-hypervisor")  # each has the name of its program
KERNEL = GuestKernel(HOST / "vmlinuz", HOST / "initramfs.cpio")
LARGE_MB = 3456  # its memory is in two parts, around the addresses of devices below 4 GB
PAGES = "bytes(number % 251 for number in range(len(memory) // 4096))"
FILL = f"number = 6; memory = bytearray(448 << 20); memory[::4096] = {PAGES}"  # more than fits into the upper part
CHECK = f"memory[::4096] == {PAGES}"


async def main() -> None:
    os.umask(0o077)  # as the product does: machines of other users must not need the files of the home
    probe.KVM_DEADLINE_S = SLOW_S  # for hosts that do not emulate their CPU
    await run_tool(["mount", "/dev/vdc", str(DISK)])
    for name in DRIVERS:
        if find_tool(name):
            try:
                await examine(name)
            except Exception:
                report(name, "failed", error=traceback.format_exc()[-3000:])


async def examine(name: str) -> None:
    folder = DISK / name
    config = DriverConfig(run_dir=folder / "run", cache_dir=folder / "cache", kernel=KERNEL)
    own = await load_driver(name, replace(config, own_kernel=True)).probe()
    report(name, "a kernel of the user's own", usable=own.usable, reason=own.reason)
    driver = load_driver(name, config)
    assert isinstance(driver, SnapshotDriver)
    verdict = await driver.probe()
    report(name, "probe", usable=verdict.usable, reason=verdict.reason, version=verdict.version)
    saved, forked = folder / "saved", folder / "forked"
    saved.mkdir(parents=True)
    forked.mkdir()
    began = time.monotonic()
    async with (
        driver.launch(spec("cold")) as machine,
        AgentClient.open(await machine.connect(), timeout_s=SLOW_S) as agent,
    ):
        report(name, "booted", seconds=time.monotonic() - began)
        await agent.warm(WarmUp(code="warm = True"), timeout_s=SLOW_S)
        snapshot = await driver.snapshot(machine, saved)
    began = time.monotonic()
    async with opened(driver, snapshot, spec("a")) as (machine, agent):
        shown = await run(agent, "import socket; number = 6; socket.gethostname(), number")
        report(name, "restored", shown=shown, seconds=time.monotonic() - began)
        report(name, "usage", mb=(await machine.usage()).memory_bytes >> 20)
        fork = await driver.snapshot(machine, forked, keep=True)
        report(name, "goes on", shown=await run(agent, "number * 7"), mb=(await machine.usage()).memory_bytes >> 20)
    async with opened(driver, fork, spec("b")) as (_, agent):
        report(name, "forked", shown=await run(agent, "number, socket.gethostname()"))
    await copy_large(driver, folder / "large")
    report(name, "without a root file system", error=await boot_without_root(driver, folder / "nothing"))
    await driver.aclose()
    report(name, "left", files=[path.name for path in (folder / "run").iterdir()])


async def copy_large(driver: SnapshotDriver, folder: Path) -> None:
    """Copy a machine with more than 3 GB, and the copy. Its kernel fills the upper part of memory first."""
    saved, forked = folder / "saved", folder / "forked"
    saved.mkdir(parents=True)
    forked.mkdir()
    large = replace(spec("large"), memory_mb=LARGE_MB)
    async with (
        driver.launch(large) as machine,
        AgentClient.open(await machine.connect(), timeout_s=SLOW_S) as agent,
    ):
        await agent.warm(WarmUp(code="warm = True"), timeout_s=SLOW_S)
        snapshot = await driver.snapshot(machine, saved)
    async with opened(driver, snapshot, large) as (machine, agent):
        await run(agent, FILL)
        fork = await driver.snapshot(machine, forked, keep=True)
        report(driver.name, "large", shown=await run(agent, f"number * 7, {CHECK}"))
    async with opened(driver, fork, large) as (_, agent):
        report(driver.name, "large, copied", shown=await run(agent, f"number * 7, {CHECK}"))


async def boot_without_root(driver: SnapshotDriver, image: Path) -> str:
    """Boot a machine that can only reboot, which ends it; return how."""
    image.write_bytes(bytes(1 << 20))
    image.chmod(0o644)
    async with driver.launch(replace(spec("broken"), root=image)) as machine:
        try:
            await machine.connect()
        except MachineLost as error:
            return str(error)
    return "an agent listens"


@asynccontextmanager
async def opened(
    driver: SnapshotDriver, snapshot: Snapshot, restored: MachineSpec
) -> AsyncIterator[tuple[Machine, AgentClient]]:
    async with (
        driver.restore(snapshot, restored) as machine,
        AgentClient.open(await machine.connect(), timeout_s=SLOW_S, identity=identity(restored.id)) as agent,
    ):
        yield machine, agent


async def run(agent: AgentClient, code: str) -> list[str]:
    """Run code; return what it shows, and its error if it fails."""
    async with agent.run(RunCode(code=code)) as events:
        seen = [event async for event in events]
    failed = [str(event.error) for event in seen if isinstance(event, Finished) and event.error]
    return [event.data["text/plain"] for event in seen if isinstance(event, Display)] + failed


def identity(name: str) -> Identity:
    return Identity(hostname=f"sandbox-{name}", machine_id=name[0] * 32, entropy=os.urandom(64))


def spec(name: str) -> MachineSpec:
    return MachineSpec(name, HOST / "root.erofs", KERNEL, memory_mb=512, vcpus=1, disk_mb=64)


def report(driver: str, what: str, **facts: object) -> None:
    print("MICROVM", json.dumps({"driver": driver, "what": what, **facts}), flush=True)


anyio.run(main)
