"""Machines of the bubblewrap driver, from their start to their end."""

import os
import signal
from pathlib import Path

import anyio
import pytest

from tests.footprint import groups_of
from tests.functional.bubblewrap_harness import Bubblewrap, RunnableMachine, make_archive
from tests.waiting import HANG_S
from vmm import limits
from vmm.errors import LaunchFailed, MachineLost
from vmm.hierarchy import Hierarchy
from vmm.process_table import with_descendants
from vmm.types import GuestCode

pytestmark = pytest.mark.vm

LOOK_S = 0.3  # long enough for a running process to be seen using CPU
SPIN = """
import os, threading
def spin():
    while True: pass
for _ in range(2): os.fork()
for _ in range(2): threading.Thread(target=spin).start()
spin()
"""


async def test_a_machine_has_the_name_and_the_cpus_it_was_given(bubblewrap: Bubblewrap):
    async with bubblewrap.machine(bubblewrap.spec("my-name", vcpus=3)) as inside:
        assert await inside.run("import os, socket\nprint(socket.gethostname(), os.cpu_count())") == "my-name 3"
        assert await inside.run("print(os.getuid(), os.getcwd())") == "1000 /"


async def test_the_agent_channel_can_be_taken_once(inside: RunnableMachine):
    with pytest.raises(MachineLost, match="already taken"):
        await inside.machine.connect()


async def test_machines_share_no_files(bubblewrap: Bubblewrap, inside: RunnableMachine):
    async with bubblewrap.machine(bubblewrap.spec("other")) as other:
        await other.run("open('/workspace/note', 'w').write('mine')")
        assert await other.run("print(open('/workspace/note').read())") == "mine"
        assert "No such file" in await inside.run("open('/workspace/note')")


async def test_a_paused_machine_uses_no_cpu_and_continues_where_it_was(bubblewrap: Bubblewrap):
    async with bubblewrap.machine() as inside:
        await inside.run("kept = 'still here'")
        code = f"import os\nif os.fork() == 0:\n    exec({SPIN!r})\nprint('spinning')"
        assert await inside.run(code) == "spinning"
        await inside.machine.pause()
        before = await inside.machine.usage()
        await inside.send("print(kept)")
        with anyio.move_on_after(LOOK_S):
            await inside.stream.receive()
            pytest.fail("a paused machine answered")
        assert (await inside.machine.usage()).cpu_s == before.cpu_s
        await inside.machine.resume()
        assert await inside.run("pass") == "still here"
        with anyio.fail_after(HANG_S):
            while (await inside.machine.usage()).cpu_s == before.cpu_s:
                await anyio.sleep(0)


async def test_processes_that_code_stopped_stay_stopped_after_a_pause(bubblewrap: Bubblewrap):
    async with bubblewrap.machine() as inside:
        await inside.run(
            "import os, signal\nchild = os.fork()\n"
            "if child == 0:\n    os.kill(os.getpid(), signal.SIGSTOP); os._exit(7)\n"
            "os.waitpid(child, os.WUNTRACED)"
        )
        await inside.machine.pause()
        await inside.machine.resume()
        assert await inside.run("print(os.waitpid(child, os.WNOHANG))") == "(0, 0)"


async def test_usage_counts_all_processes_of_the_machine(bubblewrap: Bubblewrap):
    async with bubblewrap.machine() as inside:
        idle = await inside.machine.usage()
        await inside.run(
            "import os, signal\nready, told = os.pipe()\nif os.fork() == 0:\n"
            "    block = b'x' * (48 << 20); sum(range(1_000_000)); os.write(told, b'!'); signal.pause()\n"
            "os.read(ready, 1)"
        )
        busy = await inside.machine.usage()
        assert busy.private_bytes - idle.private_bytes > 40 << 20
        assert busy.cpu_s > idle.cpu_s


async def test_a_machine_ends_with_its_agent_and_reports_how(bubblewrap: Bubblewrap, tmp_path):
    code = GuestCode(make_archive(tmp_path / "agent.tar", "raise SystemExit('enough for today')"))
    async with bubblewrap.driver.launch(bubblewrap.spec(boot=code)) as machine:
        with anyio.fail_after(HANG_S):
            end = await machine.wait()
    assert end.code == 1
    assert "enough for today" in end.detail


async def test_all_processes_end_when_bubblewrap_is_killed(bubblewrap: Bubblewrap):
    async with bubblewrap.machine() as inside:
        await inside.run("import os, signal\nif os.fork() == 0:\n    os.setsid(); signal.pause()")
        processes = with_descendants(inside.machine.pid)[1:]
        assert len(processes) == 2
        os.kill(inside.machine.pid, signal.SIGKILL)
        with anyio.fail_after(HANG_S):
            assert (await inside.machine.wait()).signal == signal.SIGKILL
            while any(_alive(pid) for pid in processes):
                await anyio.sleep(0)


async def test_leaving_a_paused_machine_leaves_nothing(bubblewrap: Bubblewrap):
    async with bubblewrap.machine() as inside:
        processes = with_descendants(inside.machine.pid)
        groups = groups_of(inside.machine.pid)
        await inside.machine.pause()
    assert not any(_alive(pid) for pid in processes)
    assert not any(group.exists() for group in groups)


async def test_too_much_memory_ends_the_machine_with_that_reason(bubblewrap: Bubblewrap):
    async with bubblewrap.machine() as inside:
        if not groups_of(inside.machine.pid):
            pytest.skip("this host has no cgroups for us")
        await inside.send("hoard = []\nwhile True: hoard.append(b'x' * (16 << 20))")
        with anyio.fail_after(HANG_S):
            end = await inside.machine.wait()
    assert "exceeded the host's memory limit" in end.detail


async def test_without_cgroups_the_server_ends_a_machine_that_takes_too_much_memory(
    bubblewrap: Bubblewrap, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "detect", lambda: Hierarchy(None, reason="none in this test"))
    async with bubblewrap.machine() as inside:
        assert groups_of(inside.machine.pid) == []
        await inside.send("hoard = [b'x' * (16 << 20) for _ in range(20)]")  # more than its memory and the overhead
        with anyio.fail_after(HANG_S):
            end = await inside.machine.wait()
    assert "exceeded the host's memory limit" in end.detail


async def test_a_tree_that_cannot_be_a_root_fails_the_launch(bubblewrap: Bubblewrap, tmp_path):
    with pytest.raises(LaunchFailed, match=r"machine rootless did not start: status 1: bwrap: Can't mkdir"):
        async with bubblewrap.driver.launch(bubblewrap.spec("rootless", root=tmp_path)):
            pytest.fail("must not start")


def _alive(pid: int) -> bool:
    """Return whether a process still runs. A zombie does not: init reaps orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
