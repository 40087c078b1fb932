"""Many machines from one snapshot: they share nothing, and none changes the snapshot."""

import dataclasses
import hashlib
import os
from pathlib import Path

import anyio
import psutil
import pytest

from mcp_sandbox.machines.provider import MachineRequest
from templates.build import BuiltTemplate
from tests.footprint import descriptors
from tests.functional.machines import Machines
from tests.waiting import HANG_S
from vmm.memory import data_extents

pytestmark = pytest.mark.vm

CHUNK = 4 * 1024 * 1024


def fingerprint(built: BuiltTemplate) -> dict[str, tuple[str, int]]:
    """Return content and mtime of every file that clones start from."""
    parts = [built.root, *(getattr(built.boot, field.name) for field in dataclasses.fields(built.boot))]
    parts += [built.snapshot.path] if built.snapshot else []
    files = [file for part in parts for file in (part, *part.rglob("*")) if file.is_file() and not file.is_symlink()]
    return {str(file): (digest(file), file.stat().st_mtime_ns) for file in files}


def digest(path: Path) -> str:
    """Return a hash of a file's data and its positions, without reading holes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        for start, end in data_extents(file.fileno(), path.stat().st_size):
            found.update(f"{start}-{end}".encode())
            for at in range(start, end, CHUNK):
                found.update(os.pread(file.fileno(), min(CHUNK, end - at), at))
    return found.hexdigest()


async def test_clones_share_neither_memory_nor_disk(machines: Machines):
    with anyio.fail_after(HANG_S):
        async with machines.clone() as one, machines.clone() as two:
            await one.run("import builtins\nmark = builtins.mark = 'one'\nopen('/workspace/mark', 'w').write('one')")
            await one.run("import os; os.sync()")
            ran = await two.run(
                "import builtins, os\nprint(hasattr(builtins, 'mark'), os.path.exists('/workspace/mark'))"
            )
            assert ran.out == "False False"
            await two.run("mark = 'two'\nopen('/workspace/mark', 'w').write('two')\nimport os; os.sync()")
            assert (await one.run("print(mark, open('/workspace/mark').read())")).out == "one one"
        async with machines.clone() as later:
            ran = await later.run("import os\nprint('mark' in globals(), os.path.exists('/workspace/mark'))")
            assert ran.out == "False False"


async def test_clones_do_not_change_the_files_they_start_from(machines: Machines):
    before = fingerprint(machines.built)
    with anyio.fail_after(HANG_S):
        async with machines.clone() as clone:
            await clone.run("block = b'x' * (100 << 20)")
            await clone.run("import os\nopen('block', 'wb').write(os.urandom(8 << 20))\nos.sync()")
            await clone.machine.pause()
            await clone.machine.resume()
            await clone.run("print('fine')")
    assert fingerprint(machines.built) == before


@pytest.mark.parametrize("after_ms", [0, 1, 5, 10, 20, 30, 45, 60, 80, 100])
async def test_a_cancelled_restore_leaves_nothing(machines: Machines, after_ms: int):
    before, children = descriptors(), psutil.Process().children()
    with anyio.move_on_after(after_ms / 1000) as scope:
        async with machines.restored():
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert psutil.Process().children() == children
    assert descriptors() == before


@pytest.mark.parametrize("after_ms", [0, 30, 60, 90, 120, 150, 200, 300])
async def test_a_cancelled_acquire_leaves_nothing(machines: Machines, after_ms: int):
    """Including cancellations while the new machine is greeted and made unique."""
    before, children = descriptors(), psutil.Process().children()
    provider = machines.provider()
    await provider.facts()
    with anyio.move_on_after(after_ms / 1000) as scope:
        async with provider.acquire(MachineRequest(machines.built.template.name)):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert psutil.Process().children() == children
    assert descriptors() == before


async def test_the_driver_works_after_a_cancelled_restore(machines: Machines):
    with anyio.move_on_after(0.03):
        async with machines.restored():
            await anyio.sleep_forever()
    with anyio.fail_after(HANG_S):
        async with machines.clone() as clone:
            assert (await clone.run("print('fine')")).out == "fine"
