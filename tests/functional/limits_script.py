"""Runs inside the emulated host, which has only cgroup v2: whether limits are enforced."""

import json
import os
import sys
from pathlib import Path

import anyio

from vmm.hierarchy import Hierarchy, pid_namespace
from vmm.limits import control_group, detect, sweep
from vmm.process import Confinement, spawn
from vmm.types import Exit, Limits

MIB = 1024 * 1024
PLAIN = Confinement(offline=False)
HOARD = "hoard = [bytearray(1 << 20) for _ in range(256)]; print('has it all')"
FORKS = """
import os, signal
made = 0
try:
    while made < 64:
        if os.fork() == 0:
            signal.pause()
        made += 1
except BlockingIOError:
    pass
print(made)
"""
LOOK = "from vmm.limits import detect; print(detect().describe())"
ORDINARY = 1000


async def main() -> None:
    hierarchy = detect()
    [folder] = hierarchy.folders
    report("detected", version=hierarchy.version, text=hierarchy.describe())
    await memory(hierarchy)
    end, _ = await run(hierarchy, Limits(pids=10), FORKS)
    report("pids", forked=end.detail)
    await freezing(hierarchy)
    (folder / f"999999999-1-{pid_namespace()}-dead").mkdir()
    report("swept", removed=len(sweep([folder])), left=groups(folder))
    await user_in_a_session(folder.parent)


async def memory(hierarchy: Hierarchy) -> None:
    limits = Limits(memory_bytes=64 * MIB, cpus=0.5)
    end, files = await run(hierarchy, limits, HOARD, "memory.max", "memory.swap.max", "cpu.max")
    report("memory", signal=end.signal, files=files)
    end, files = await run(hierarchy, Limits(memory_bytes=512 * MIB), HOARD)
    report("enough memory", printed=end.detail, files=files)


async def run(hierarchy: Hierarchy, limits: Limits, code: str, *files: str) -> tuple[Exit, dict[str, object]]:
    """Return how Python code ended under limits, and the contents of its cgroup's files."""
    async with control_group(hierarchy, "box", limits) as group:
        argv = group.wrap([sys.executable, "-c", code])
        async with spawn(argv, confinement=PLAIN, before_start=group.add) as process:
            end = await process.wait()
        [place] = group.directories()
        contents = {file: (place / file).read_text().strip() for file in files}
        return end, {**contents, "out of memory": group.out_of_memory()}


async def freezing(hierarchy: Hierarchy) -> None:
    async with control_group(hierarchy, "box", Limits()) as group:
        async with spawn(["cat"], confinement=PLAIN, before_start=group.add, stdio=True) as process:
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


async def user_in_a_session(mount: Path) -> None:
    """Try cgroups as a user who may create them in the slice, but may not move a process out of the session."""
    slice_, session = mount / "slice", mount / "slice/session"
    session.mkdir(parents=True)
    (slice_ / "cgroup.subtree_control").write_text("+memory +cpu +pids")
    for path in (slice_, slice_ / "cgroup.subtree_control"):
        os.chown(path, ORDINARY, ORDINARY)

    def enter(pid: int) -> None:
        (session / "cgroup.procs").write_text(str(pid))

    argv = ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", sys.executable, "-c", LOOK]
    user = Confinement(uid=ORDINARY, offline=False)
    async with spawn(argv, confinement=user, before_start=enter) as process:
        await process.wait()
    report("user in a session", seen=process.tail, left=groups(slice_))


def groups(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def report(what: str, **facts: object) -> None:
    print("LIMITS", json.dumps({"what": what, **facts}), flush=True)


anyio.run(main)
