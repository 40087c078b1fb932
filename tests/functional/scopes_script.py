"""Runs inside the emulated host: an ordinary user with a systemd user session, whose scopes limit machines.

There is no system-wide systemd, so this script does what a login would do: it delegates a cgroup to the user.
"""

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from vmm import scopes
from vmm.hierarchy import Hierarchy, with_scopes
from vmm.limits import control_group
from vmm.process import Confinement, RunningProcess, spawn
from vmm.types import Exit, Limits

MIB = 1024 * 1024
USER = 1000
RUNTIME = Path(f"/run/user/{USER}")
SERVICE = Path(f"/sys/fs/cgroup/user.slice/user-{USER}.slice/user@{USER}.service")
SLOW_S = 300.0  # everything here is emulated, and the host may be busy
HOARD = "hoard = [bytearray(1 << 20) for _ in range(256)]; print('has it all')"
LOOK = """
import json, os
from pathlib import Path
place = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().strip().removeprefix("0::"))
files = {name: (place / name).read_text().strip() for name in ("memory.max", "cpu.max", "pids.max")}
print(json.dumps({"slice": place.parent.name, "session": "XDG_RUNTIME_DIR" in os.environ, **files}))
"""


async def as_root() -> None:
    """Do what a login does, then run this script again as the user."""
    delegate()
    environment = ["env", f"XDG_RUNTIME_DIR={RUNTIME}", f"PYTHONPATH={os.environ['PYTHONPATH']}", "HOME=/tmp"]
    async with as_user([*environment, "/usr/lib/systemd/systemd", "--user"], SERVICE):
        with anyio.fail_after(SLOW_S):
            while not (RUNTIME / "systemd/private").exists():
                await anyio.sleep(0.05)
        session = SERVICE / "session"
        session.mkdir()
        async with as_user([*environment, sys.executable, __file__], session) as script:
            with anyio.move_on_after(SLOW_S):
                await script.wait()
            print(script.tail, flush=True)


@asynccontextmanager
async def as_user(argv: list[str], group: Path) -> AsyncIterator[RunningProcess]:
    def enter(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))

    async with spawn(argv, confinement=Confinement(uid=USER, offline=False), before_start=enter) as process:
        yield process


def delegate() -> None:
    Path("/run/systemd/system").mkdir(parents=True)  # programs take it as a sign that systemd runs
    RUNTIME.mkdir(parents=True)
    os.chown(RUNTIME, USER, USER)
    SERVICE.mkdir(parents=True)
    for place in reversed(SERVICE.parents[:3]):
        (place / "cgroup.subtree_control").write_text("+memory +cpu +pids")
    for path in (SERVICE, SERVICE / "cgroup.procs", SERVICE / "cgroup.subtree_control"):
        os.chown(path, USER, USER)


async def as_an_ordinary_user() -> None:
    scopes.TRIAL_S = SLOW_S
    manager = scopes.find_manager(os.environ)
    assert manager is not None
    hierarchy = with_scopes(Hierarchy(None, reason="it may create none"), manager, scopes.controllers(manager))
    report("detected", text=hierarchy.describe(), gap=hierarchy.gap())
    limits = Limits(memory_bytes=64 * MIB, cpus=0.5, pids=16)
    report("inside", **json.loads((await run(hierarchy, limits, LOOK)).detail))
    end = await run(hierarchy, limits, HOARD)
    report("memory", signal=end.signal, printed=end.detail)
    await freezing(hierarchy)
    with anyio.fail_after(SLOW_S):  # systemd removes a scope a moment after its last process
        while left := [path.name for path in SERVICE.glob("app.slice/mcp-sandbox*")]:
            await anyio.sleep(0.05)
    report("ended", left=left)


async def run(hierarchy: Hierarchy, limits: Limits, code: str) -> Exit:
    """Return how Python code ended, confined like a machine."""
    async with control_group(hierarchy, "box", limits) as group:
        argv = group.wrap([sys.executable, "-c", code])
        async with spawn(argv, confinement=Confinement(), before_start=group.add) as process:
            return await process.wait()


async def freezing(hierarchy: Hierarchy) -> None:
    async with control_group(hierarchy, "frozen", Limits()) as group:
        argv = group.wrap(["cat"])
        async with spawn(argv, confinement=Confinement(), before_start=group.add, stdio=True) as process:
            await process.stream.send(b"1")
            first = await process.stream.receive()
            frozen = await group.freeze()
            await process.stream.send(b"2")
            silent = True
            with anyio.move_on_after(0.5):
                await process.stream.receive()
                silent = False
            await group.thaw()
            report("frozen", can=frozen, silent=silent, then=(first + await process.stream.receive()).decode())
            await group.freeze()
        report("killed", left=Path(f"/proc/{process.pid}").exists())


def report(what: str, **facts: object) -> None:
    print("SCOPES", json.dumps({"what": what, **facts}), flush=True)


anyio.run(as_root if os.geteuid() == 0 else as_an_ordinary_user)
