"""What machines of every driver do."""

import os
import signal
import time

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import RunCode
from guest.errors import AgentGone, RequestRefused
from tests.functional.machines import Clone, Machines, pid_of
from tests.waiting import HANG_S, promised
from vmm.errors import MachineLost
from vmm.scratch import scratch_mb
from vmm.types import Isolation

pytestmark = pytest.mark.vm

SILENCE_S = 0.5  # a machine that runs answers in 10 ms
PAUSE_S = 1.0
MIB = 1024 * 1024


@pytest.mark.rights
async def test_a_machine_boots_and_its_agent_says_hello(machines: Machines):
    with anyio.fail_after(HANG_S):
        async with machines.booted() as machine:
            stream = await machine.connect()
            async with AgentClient.open(stream, timeout_s=HANG_S) as agent:
                assert agent.hello.language == "python"


async def test_a_restored_machine_says_hello(clone: Clone):
    assert clone.agent.hello.language == "python"
    assert clone.agent.hello.language_version.startswith("3.")


@pytest.mark.rights
async def test_a_restored_machine_is_made_unique(machines: Machines, clone: Clone):
    refreshed = clone.agent.refreshed
    assert refreshed is not None
    assert abs(refreshed.clock_skew_s) < 1
    if machines.host.driver.capabilities.isolation is Isolation.VM:
        assert refreshed.entropy_credited
        assert refreshed.hostname_set
    assert (await clone.run("import socket; print(socket.gethostname())")).out == clone.machine.id


async def test_code_runs_and_its_last_expression_is_shown(clone: Clone):
    ran = await clone.run("print('said')\n6 * 7")
    assert ran.out == "said"
    assert [display.data["text/plain"] for display in ran.displays] == ["42"]


async def test_state_is_kept_between_runs(clone: Clone):
    await clone.run("import fractions\nhalf = fractions.Fraction(1, 2)")
    assert (await clone.run("print(half + half / 2)")).out == "3/4"


async def test_files_are_read_back_as_written(clone: Clone):
    data = bytes(range(256)) * 12_289  # over several frames, and not a multiple of a page
    written = await clone.agent.write("/workspace/deep/down/data.bin", data)
    assert (written.kind, written.size) == ("file", len(data))
    assert (await clone.run("print(len(open('deep/down/data.bin', 'rb').read()))")).out == str(len(data))
    assert (await clone.agent.read("/workspace/deep/down/data.bin", limit=2 * len(data))).data == data
    listing = await clone.agent.list("/workspace", recursive=True, max_entries=10)
    assert "/workspace/deep/down/data.bin" in [entry.path for entry in listing.entries]
    await clone.run("import os; os.remove('deep/down/data.bin')")
    with pytest.raises(RequestRefused) as refusal:
        await clone.agent.read("/workspace/deep/down/data.bin", limit=1)
    assert refusal.value.code == "not_found"


async def test_files_left_in_the_outputs_directory_are_artifacts_of_their_run(clone: Clone):
    ran = await clone.run("open('/tmp/outputs/table.csv', 'w').write('a,b\\n1,2\\n')")
    assert [(artifact.path, artifact.size) for artifact in ran.artifacts] == [("/tmp/outputs/table.csv", 8)]
    assert (await clone.run("1")).artifacts == ()
    assert (await clone.agent.read("/tmp/outputs/table.csv", limit=100)).data == b"a,b\n1,2\n"


@pytest.mark.rights
async def test_a_paused_machine_is_silent_and_continues_where_it_was(clone: Clone):
    await clone.run("kept = 'still here'")
    await clone.machine.pause()
    with anyio.move_on_after(SILENCE_S):
        await clone.agent.ping()
        pytest.fail("a paused machine answered")
    await clone.machine.resume()
    assert (await clone.run("print(kept)")).out == "still here"


@pytest.mark.rights
async def test_a_paused_machine_uses_no_cpu_and_its_clocks_run_on(clone: Clone):
    show = "import time; print(time.time(), time.monotonic())"
    before, then = time.time(), (await clone.run(show)).out.split()
    await clone.machine.pause()
    used = (await clone.machine.usage()).cpu_s
    await anyio.sleep(PAUSE_S)
    assert (await clone.machine.usage()).cpu_s == used
    await clone.machine.resume()
    now = (await clone.run(show)).out.split()
    for clock, earlier in zip(now, then, strict=True):
        assert PAUSE_S <= float(clock) - float(earlier) < time.time() - before


@pytest.mark.rights
async def test_usage_grows_with_a_machines_work(clone: Clone):
    idle = await clone.machine.usage()
    assert 5 * MIB < idle.private_bytes <= idle.memory_bytes < 512 * MIB
    await clone.run("block = b'x' * (64 << 20)\nsum(range(100_000))")
    busy = await clone.machine.usage()
    assert busy.private_bytes - idle.private_bytes >= 60 * MIB
    assert busy.cpu_s > idle.cpu_s


async def test_a_machine_is_as_large_as_its_specification_says(machines: Machines, clone: Clone):
    size = machines.built.template.machine
    disk = await clone.run("import os; disk = os.statvfs('.'); print(disk.f_blocks * disk.f_frsize)")
    spec, is_vm = machines.built.spec("any"), machines.host.driver.capabilities.isolation is Isolation.VM
    disk_mb = size.disk_mb if is_vm else scratch_mb(spec)["/workspace"]  # elsewhere files are in memory
    assert 0.8 * disk_mb * MIB < int(disk.out) <= disk_mb * MIB
    if is_vm:
        memory = await clone.run("print(open('/proc/meminfo').readline().split()[1])")
        assert 0.7 * size.memory_mb * MIB < int(memory.out) * 1024 <= size.memory_mb * MIB
    if machines.host.driver.name != "gvisor":  # gVisor shows all CPUs of the host
        assert (await clone.run("import os; print(os.cpu_count())")).out == str(size.vcpus)


async def test_the_agents_stream_can_be_taken_once(machines: Machines):
    with anyio.fail_after(HANG_S):
        async with machines.restored() as machine, await machine.connect():
            with pytest.raises(MachineLost, match="already taken"):
                await machine.connect()


@pytest.mark.rights
async def test_wait_returns_the_signal_that_killed_a_machine(machines: Machines):
    with anyio.fail_after(HANG_S):
        async with machines.restored() as machine:
            os.kill(pid_of(machine), signal.SIGKILL)
            assert (await machine.wait()).signal == signal.SIGKILL


@pytest.mark.rights
async def test_killing_a_machine_ends_its_run(clone: Clone):
    async def run_and_kill() -> None:
        async with clone.agent.run(RunCode("print('running', flush=True)\nwhile True: pass")) as running:
            async for _ in running:
                os.kill(clone.pid, signal.SIGKILL)

    with anyio.fail_after(HANG_S):
        with pytest.raises(AgentGone):
            await run_and_kill()
        assert (await clone.machine.wait()).signal == signal.SIGKILL
        with pytest.raises(MachineLost):
            await clone.machine.usage()
        with pytest.raises(MachineLost):
            await clone.machine.pause()


async def test_code_cannot_shut_its_machine_down(clone: Clone):
    ran = await clone.run(
        "import ctypes, os\n"
        "print(ctypes.CDLL(None, use_errno=True).reboot(0x4321fedc), os.strerror(ctypes.get_errno()))"
    )
    assert ran.out == "-1 Operation not permitted"


@pytest.mark.rights
async def test_leaving_a_machine_in_the_middle_of_a_run_is_quick(machines: Machines):
    with anyio.fail_after(HANG_S):
        async with machines.clone() as clone:
            signalled = anyio.current_time()
            with anyio.move_on_after(SILENCE_S):
                await clone.run("while True: pass", grace_s=0.5)
    assert anyio.current_time() - signalled < SILENCE_S + promised()
