"""What code can use up, and that it uses up nothing but its own machine."""

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
    """How the run ended; None if the machine ended with it, or does not answer any more and is given up."""
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


async def test_code_that_takes_all_memory_is_killed_and_the_result_says_so(machines: Machines, clone: Clone):
    ran = await outcome(clone, MEMORY_BOMB, stop_after_s=25)
    if ran is not None:
        assert ran.end.status in ("killed", "error")
        if ran.end.status == "killed":
            assert ran.end.state == "lost"
        else:
            assert ran.end.error is not None
            assert ran.end.error.name == "MemoryError"
        assert (await clone.run("print('goes on')")).out == "goes on"
    await assert_works(machines)


async def test_a_fork_bomb_stays_in_its_machine_and_can_be_stopped(machines: Machines, clone: Clone):
    before = len(psutil.pids())
    ran = await outcome(clone, FORK_BOMB, stop_after_s=2)
    # In a virtual machine the host sees none of them. Elsewhere all, and gVisor has a process of its own for each.
    assert len(psutil.pids()) - before < MOST_PROCESSES
    if ran is not None:
        assert ran.end.status in ("interrupted", "killed")
        assert (await clone.run("print('goes on')")).out == "goes on"
    await assert_works(machines)


async def test_a_full_disk_is_an_error_in_the_machine_and_nothing_more(clone: Clone):
    ran = await clone.run(FILL_DISK)
    assert ran.out.startswith("1 ")
    assert "No space left on device" in ran.out
    assert (await clone.run("import os; os.remove('more'); os.remove('ballast'); print('goes on')")).out == "goes on"
    await clone.agent.write("/workspace/after", b"room again")


async def test_output_without_end_is_cut_and_the_run_can_be_stopped(clone: Clone):
    ran = await clone.run("while True: print('y' * 997)", stop_after_s=2)
    assert ran.end.status == "interrupted"
    assert ran.end.state == "kept"
    assert len(ran.stdout.head) + len(ran.stdout.tail) <= 2 * SHOWN_BYTES
    assert ran.end.output.stdout_bytes == ran.stdout.omitted_bytes + len(ran.stdout.head) + len(ran.stdout.tail)
    assert ran.stdout.spill is not None
    spilled = await clone.agent.read(ran.stdout.spill, limit=1)
    assert spilled.size == ran.end.output.stdout_bytes or not ran.end.output.spill_complete
    assert (await clone.run("print('goes on')")).out == "goes on"


async def test_a_machine_that_burns_all_its_cpus_does_not_keep_others_from_starting(machines: Machines, clone: Clone):
    burn = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clone.run, burn)
        await assert_works(machines)
        tasks.cancel_scope.cancel()
