"""Code can exhaust its own machine and nothing else."""

from pathlib import Path

import anyio
import psutil
import pytest

from guest.errors import AgentGone, AgentTimeout
from tests.footprint import groups_of
from tests.functional.machines import SHOWN_BYTES, Clone, Machines, Ran
from tests.waiting import promised

pytestmark = pytest.mark.vm

MIB = 1024 * 1024
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
SLEEPING_FORKS = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        time.sleep(600)
"""
GREEDY_CHILDREN = """
import subprocess, sys
hoard = "hoard = bytearray(200 << 20); print('full', flush=True); import time; time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", hoard]) for _ in range(8)]
print([child.wait() for child in children])
"""
FILES_AND_MEMORY = """
import os
hoard = []
places = ["/workspace", "/tmp", "/dev/shm"]
for number in range(64):
    hoard.append(bytearray(16 << 20))
    for place in list(places):
        try:
            with open(f"{place}/{number}", "wb") as file:
                file.write(bytes(16 << 20))
        except OSError:
            places.remove(place)
"""
UNMAPPED_FILES = """
import os
files = [os.memfd_create(str(number)) for number in range(64)]
for file in files: os.write(file, bytes(16 << 20))
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


def peak_file(group: Path) -> Path | None:
    """Return the file with the highest memory use of a cgroup, if it counts memory."""
    files = [group / name for name in ("memory.peak", "memory.max_usage_in_bytes")]
    return next((file for file in files if file.exists()), None)


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
        over_memory = (
            ran.end.error is not None and ran.end.error.name == "MemoryLimitExceeded"
        )  # in gVisor forks are large
        assert over_memory or ran.end.status in ("interrupted", "killed")
        assert (await clone.run("print('fine')")).out == "fine"
    await assert_works(machines)


@pytest.mark.parametrize("code", [SLEEPING_FORKS, GREEDY_CHILDREN, FILES_AND_MEMORY, UNMAPPED_FILES])
async def test_code_that_takes_too_much_memory_in_any_way_is_ended_and_the_sandbox_goes_on(
    machines: Machines, clone: Clone, code: str
):
    ran = await outcome(clone, code, stop_after_s=25)
    assert ran is not None, "the machine was lost"
    assert (await clone.run("print('fine')")).out == "fine"
    if machines.host.driver.name == "gvisor":  # elsewhere forks cost little, and the kernel of host or guest may kill
        assert ran.end.error is not None
        assert ran.end.error.name in ("MemoryLimitExceeded", "MemoryError")


async def test_a_machine_takes_no_more_of_the_host_than_its_memory_and_the_overhead(machines: Machines, clone: Clone):
    peaks = [file for group in groups_of(clone.pid) if (file := peak_file(group)) is not None]
    if not peaks:
        pytest.skip("no cgroup counts the memory of a machine")
    await outcome(clone, GREEDY_CHILDREN, stop_after_s=15)
    [peak] = [int(file.read_text()) for file in peaks]
    assert 10 * MIB < peak <= machines.built.spec("any").host_bytes


async def test_a_machine_has_room_for_a_hundred_small_processes(clone: Clone):
    """They use little memory, whatever a driver reserves for each of them."""
    ran = await clone.command(
        "for i in $(seq 100); do sleep 300 & done; set -- /proc/[0-9]*; [ $# -gt 100 ] && kill $(jobs -p)"
    )
    assert ran.end.status == "ok"
    assert (await clone.run("print('fine')")).out == "fine"


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
