"""Code can exhaust its own machine and nothing else."""

import anyio
import psutil
import pytest

from guest.errors import AgentGone, AgentTimeout
from tests.functional.machines import SHOWN_BYTES, Clone, Machines, Ran
from tests.waiting import promised

pytestmark = pytest.mark.vm

MOST_PROCESSES = 400
MEMORY_BOMB = """
hoard = []
while True:
    hoard.append(b"x" * (16 << 20))
"""
FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
FILL_DISK = """
import os, subprocess
space = os.statvfs("/workspace")
most = space.f_bavail * space.f_frsize - (16 << 20)
with open("ballast", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, most)  # all but the last megabytes, without writing them
done = subprocess.run(["dd", "if=/dev/zero", "of=more", "bs=1M", "count=64"], capture_output=True, text=True)
print(done.returncode, done.stderr)
"""


async def outcome(clone: Clone, code: str, stop_after_s: float) -> Ran | None:
    """Return how the run ended; None if the machine ended with it or no longer answers."""
    try:
        return await clone.run(code, stop_after_s=stop_after_s)
    except AgentGone:
        with anyio.fail_after(promised()):
            await clone.machine.wait()
    except (AgentTimeout, TimeoutError):
        pass
    return None


async def assert_works(machines: Machines) -> None:
    async with machines.clone() as clone:
        assert (await clone.run("print('fine')")).out == "fine"


async def test_code_that_exhausts_memory_is_killed_or_gets_an_error(machines: Machines, clone: Clone):
    ran = await outcome(clone, MEMORY_BOMB, stop_after_s=25)
    if ran is not None:
        assert ran.end.status in ("killed", "error")
        if ran.end.status == "killed":
            assert ran.end.state == "lost"
        else:
            assert ran.end.error is not None
            assert ran.end.error.name == "MemoryError"
        assert (await clone.run("print('fine')")).out == "fine"
    await assert_works(machines)


async def test_a_fork_bomb_stays_in_its_machine_and_can_be_stopped(machines: Machines, clone: Clone):
    before = len(psutil.pids())
    ran = await outcome(clone, FORK_BOMB, stop_after_s=2)
    # The host sees no process of a virtual machine, and a process for each one of other machines.
    assert len(psutil.pids()) - before < MOST_PROCESSES
    if ran is not None:
        assert ran.end.status in ("interrupted", "killed")
        assert (await clone.run("print('fine')")).out == "fine"
    await assert_works(machines)


async def test_a_full_disk_is_only_an_error_in_the_machine(clone: Clone):
    ran = await clone.run(FILL_DISK)
    assert ran.out.startswith("1 ")
    assert "No space left on device" in ran.out
    assert (await clone.run("import os; os.remove('more'); os.remove('ballast'); print('fine')")).out == "fine"
    await clone.agent.write("/workspace/after", b"room again")


async def test_endless_output_is_truncated_and_the_run_can_be_stopped(clone: Clone):
    ran = await clone.run("while True: print('y' * 997)", stop_after_s=2)
    assert ran.end.status == "interrupted"
    assert ran.end.state == "kept"
    assert len(ran.stdout.head) + len(ran.stdout.tail) <= 2 * SHOWN_BYTES
    assert ran.end.output.stdout_bytes == ran.stdout.omitted_bytes + len(ran.stdout.head) + len(ran.stdout.tail)
    assert ran.stdout.spill is not None
    spilled = await clone.agent.read(ran.stdout.spill, limit=1)
    assert spilled.size == ran.end.output.stdout_bytes or not ran.end.output.spill_complete
    assert (await clone.run("print('fine')")).out == "fine"


async def test_a_machine_that_uses_all_its_cpus_does_not_stop_others_from_starting(machines: Machines, clone: Clone):
    burn = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clone.run, burn)
        await assert_works(machines)
        tasks.cancel_scope.cancel()
