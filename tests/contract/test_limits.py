"""Code can exhaust its own machine and nothing else."""

import os
from pathlib import Path

import anyio
import psutil
import pytest

from guest.client import AgentClient
from guest.client.messages import WarmUp
from guest.errors import AgentGone, AgentTimeout
from tests.footprint import groups_of
from tests.functional.machines import SHOWN_BYTES, Clone, Machines, Ran, run
from tests.waiting import BUILD_S, promised
from vmm.types import DiskRate

pytestmark = pytest.mark.vm

MIB = 1024 * 1024
MOST_PROCESSES = 400
MEMORY_BOMB = """
hoard = []
while True:
    hoard.append(b"x" * (16 << 20))
"""
THREADS = """
import numpy, threading
from concurrent.futures import ThreadPoolExecutor
square = numpy.ones((300, 300))
with ThreadPoolExecutor(8) as pool:
    barrier = threading.Barrier(8)  # so that all eight run at once
    print(sum(pool.map(lambda _: barrier.wait() * 0 + (square @ square).sum(), range(8))))
"""
WORKERS = """
import multiprocessing
from multiprocessing import shared_memory
shared = shared_memory.SharedMemory(create=True, size=8 << 20)
def write(number):
    view = shared_memory.SharedMemory(name=shared.name)
    view.buf[number] = number
    view.close()
barrier = multiprocessing.Barrier(8)
def work(number):
    write(number)
    barrier.wait()
with multiprocessing.get_context("fork").Pool(8) as pool:
    pool.map(work, range(8), chunksize=1)
print(bytes(shared.buf[:8]))
shared.close()
shared.unlink()
"""
SIZE_SEEN = """
import os, re, subprocess
memory = re.search(r"MemTotal: +([0-9]+) kB", open("/proc/meminfo").read())
nproc = int(subprocess.run(["nproc"], capture_output=True, text=True).stdout)
listed = open("/proc/cpuinfo").read().count("processor\\t")
print(int(memory[1]) // 1024, {os.cpu_count(), len(os.sched_getaffinity(0)), nproc, listed})
"""
WRITE_16_MB = """
import os, time
began = time.monotonic()
file = os.open("large", os.O_WRONLY | os.O_CREAT)
for _ in range(16):
    os.write(file, b"x" * (1 << 20))
os.sync()  # fsync has no effect in a machine
print(time.monotonic() - began)
"""
GREEDY_CHILD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "hoard = [bytearray(16 << 20) for _ in range(1000)]"])
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


@pytest.mark.rights
@pytest.mark.parametrize("code", [MEMORY_BOMB, GREEDY_CHILD])
async def test_code_that_exhausts_memory_is_ended_with_that_reason(machines: Machines, clone: Clone, code: str):
    await clone.agent.write("/workspace/kept", b"file")
    ran = await outcome(clone, code, stop_after_s=45)
    assert ran is not None, "the machine was lost"
    guest_kernel = machines.host.driver.capabilities.boots_kernel
    if not (guest_kernel and code == GREEDY_CHILD):  # the guest's kernel kills only the child
        assert ran.end.error is not None
        assert ran.end.error.name == "MemoryLimitExceeded"
        size = "" if guest_kernel else machines.built.template.machine.memory_mb  # it keeps some for itself
        assert f"more than its {size}" in ran.end.error.message
        assert ran.end.state == "lost"
    assert (await clone.run("print(open('kept').read())")).out == "file"


async def test_eight_threads_run_in_the_kernel_and_in_a_script(shared: Clone):
    assert (await shared.run(THREADS)).out == "216000000.0"
    await shared.agent.write("/workspace/threads.py", THREADS.encode())
    assert (await shared.command("python3 threads.py")).out == "216000000.0"


async def test_eight_workers_share_memory(shared: Clone):
    assert (await shared.run(WORKERS)).out == repr(bytes(range(8)))


async def test_an_absurd_allocation_is_an_error_that_costs_no_variables(shared: Clone):
    ran = await shared.run("kept = 'kept'\nimport numpy\nnumpy.zeros(10**11)")
    assert ran.end.error is not None
    assert ran.end.error.name == "MemoryError"
    assert (await shared.run("print(kept)")).out == "kept"


async def test_code_sees_the_size_of_its_machine(machines: Machines, shared: Clone):
    seen, cpus = (await shared.run(SIZE_SEEN)).out.split(" ", 1)
    size = machines.built.template.machine
    assert cpus == repr({size.vcpus})
    assert size.memory_mb * 0.8 < int(seen) <= size.memory_mb  # a guest kernel keeps some


async def test_a_machine_has_the_size_that_was_asked_for(machines: Machines):
    if machines.host.driver.capabilities.fixed_size:
        pytest.skip("it would have to take another snapshot")
    size = machines.built.template.machine.model_copy(update={"memory_mb": 640, "vcpus": len(os.sched_getaffinity(0))})
    async with machines.leased(size=size) as lease:
        assert lease.template.machine == size
        assert (await run(lease.agent, SIZE_SEEN)).out == f"640 {{{size.vcpus}}}"
        ran = await run(lease.agent, MEMORY_BOMB)
        assert ran.end.error is not None
        assert "more than its 640 MB of memory" in ran.end.error.message
        assert (await run(lease.agent, SIZE_SEEN)).out == f"640 {{{size.vcpus}}}"  # in a new kernel


async def test_a_machine_uses_its_disks_no_faster_than_its_template_allows(machines: Machines):
    if not machines.host.driver.capabilities.disk_rate:
        pytest.skip("its files are in memory")
    with anyio.fail_after(BUILD_S):  # it boots from an image that is as slow
        async with (
            machines.booted(DiskRate(mb_per_s=2)) as machine,
            AgentClient.open(await machine.connect(), timeout_s=BUILD_S) as agent,
        ):
            await agent.warm(WarmUp(), timeout_s=BUILD_S)
            seconds = float((await run(agent, WRITE_16_MB)).out)
    assert seconds > 6  # 8, less what it had not used before


@pytest.mark.rights
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


@pytest.mark.rights
@pytest.mark.parametrize("code", [SLEEPING_FORKS, GREEDY_CHILDREN, FILES_AND_MEMORY, UNMAPPED_FILES])
async def test_code_that_takes_too_much_memory_in_any_way_is_ended_and_the_sandbox_goes_on(
    machines: Machines, clone: Clone, code: str
):
    forks_are_large = machines.host.driver.name == "gvisor"  # elsewhere the kernel of host or guest may kill, too
    ran = await outcome(clone, code, stop_after_s=25 if forks_are_large else 8)
    assert ran is not None, "the machine was lost"
    assert (await clone.run("print('fine')")).out == "fine"
    if forks_are_large:
        assert ran.end.error is not None
        assert ran.end.error.name in ("MemoryLimitExceeded", "MemoryError")


async def test_a_machine_takes_no_more_of_the_host_than_its_memory_and_the_overhead(machines: Machines, clone: Clone):
    peaks = [file for group in groups_of(clone.pid) if (file := peak_file(group)) is not None]
    if not peaks:
        pytest.skip("no cgroup counts the memory of a machine")
    await outcome(clone, GREEDY_CHILDREN, stop_after_s=15)
    [peak] = [int(file.read_text()) for file in peaks]
    assert 10 * MIB < peak <= machines.built.spec("any").host_bytes


@pytest.mark.rights
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


@pytest.mark.rights
async def test_a_machine_that_uses_all_its_cpus_does_not_stop_others_from_starting(machines: Machines, clone: Clone):
    burn = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clone.run, burn)
        await assert_works(machines)
        tasks.cancel_scope.cancel()
