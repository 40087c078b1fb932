"""What code in a bubblewrap machine sees of the host, and how the host limits it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.footprint import groups_of
from tests.functional.bubblewrap_harness import SIZE, Bubblewrap, RunnableMachine
from vmm.drivers.bubblewrap import command
from vmm.process_table import with_descendants
from vmm.scratch import scratch_mb
from vmm.types import CPU_PERIOD_US, OVERHEAD_MB, CpuPriority

pytestmark = [pytest.mark.vm, pytest.mark.rights]

MIB = 1024 * 1024
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def secret() -> Iterator[None]:
    """Put a secret into our environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_SERVER", "token")
        yield


def status(pid: int) -> dict[str, str]:
    """Return /proc/PID/status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


async def test_it_sees_only_its_own_processes(inside: RunnableMachine):
    numbers = await inside.run("import os\nprint([int(name) for name in os.listdir('/proc') if name.isdigit()])")
    assert numbers == "[1]"


async def test_it_sees_no_files_of_the_host_but_the_template(inside: RunnableMachine, bubblewrap: Bubblewrap):
    top = await inside.run("import os\nprint(*sorted(os.listdir('/')))")
    assert top.split() == sorted(os.listdir(bubblewrap.tree))
    assert await inside.run(f"print(os.path.exists({str(REPO / 'vmm')!r}))") == "False"
    assert await inside.run("print(*os.listdir('/workspace'), *os.listdir('/tmp'))") == ""


async def test_it_cannot_change_the_template(inside: RunnableMachine):
    for place in ("/", "/usr", "/etc", "/dev", "/sys", "/proc/tty"):
        assert "Read-only file system" in await inside.run(f"open('{place}/mark', 'w')"), place


async def test_it_does_not_inherit_our_environment(inside: RunnableMachine):
    found = await inside.run("import os\nprint(dict(os.environ), open('/proc/1/environ', 'rb').read())")
    assert "SECRET_OF_THE_SERVER" not in found
    assert "PYTHONPATH" in found


async def test_its_first_process_is_the_agent_and_does_not_show_bubblewraps_options(inside: RunnableMachine):
    found = await inside.run("print(open('/proc/1/cmdline').read())")
    assert "guest.agent" in found
    assert "bind" not in found


async def test_it_has_nothing_open_but_its_stream_to_the_host(inside: RunnableMachine):
    found = await inside.run("import os\nprint(*(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))")
    assert all(target.startswith("pipe:") for target in found.split())
    assert await inside.run("print(os.closerange(3, 100))") == "None"
    for pid in with_descendants(inside.machine.pid)[1:]:
        targets = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert all(re.match(r"pipe:|anon_inode:|/dev/null", target) for target in targets), targets


async def test_it_cannot_read_proc_files_about_the_host(inside: RunnableMachine):
    code = f"""
import os
readable = []
for name in os.listdir("/proc"):
    if name.isdigit() or name in {command.PROC_KEPT.split()}:
        continue
    try:
        content = os.listdir(f"/proc/{{name}}") if os.path.isdir(f"/proc/{{name}}") else open(f"/proc/{{name}}").read(1)
    except PermissionError:
        content = None
    if content:
        readable.append(name)
print(readable)
"""
    assert await inside.run(code) == "[]"


async def test_it_has_only_a_loopback_device(inside: RunnableMachine):
    found = await inside.run("print(open('/proc/net/dev').read())")
    assert [line.split(":")[0].strip() for line in found.splitlines() if ":" in line] == ["lo"]
    refused = await inside.run("import socket\nsocket.create_connection(('192.0.2.1', 80), 5)")
    assert "Network is unreachable" in refused


async def test_it_shares_no_namespace_with_the_host(inside: RunnableMachine):
    for pid in with_descendants(inside.machine.pid)[1:]:
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            ours = Path(f"/proc/self/ns/{kind}").readlink()
            assert Path(f"/proc/{pid}/ns/{kind}").readlink() != ours, kind


async def test_all_its_processes_have_seccomp_filters_and_no_privileges(inside: RunnableMachine):
    for pid in with_descendants(inside.machine.pid)[1:]:
        found = status(pid)
        kinds = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
        assert {int(found[kind], 16) for kind in kinds} == {0}
        assert (found["NoNewPrivs"], found["Seccomp"], found["Seccomp_filters"]) == ("1", "2", "2")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give each machine its own user")
async def test_every_machine_runs_as_another_user(bubblewrap: Bubblewrap, inside: RunnableMachine):
    async with bubblewrap.machine(bubblewrap.spec("another")) as other:
        uids = [set(status(machine.machine.pid)["Uid"].split()) for machine in (inside, other)]
    assert all(len(each) == 1 and int(min(each)) > 1_000_000_000 for each in uids)
    assert uids[0] != uids[1]


async def test_every_place_it_can_write_to_has_a_limit(inside: RunnableMachine):
    code = """
import os
failed = {}
for place in %s:
    try:
        with open(f"{place}/ballast", "wb") as file:
            for _ in range(70): file.write(bytes(1 << 20))
    except OSError as error:
        failed[place] = error.errno
    finally:
        os.remove(f"{place}/ballast")
print(sorted(failed) == sorted(%s), set(failed.values()) <= {27, 28})
"""
    places = sorted(scratch_mb(inside.machine.spec))
    assert await inside.run(code % (places, places)) == "True True"


async def test_the_number_of_its_processes_is_limited(inside: RunnableMachine):
    code = """
import os, signal
children = []
try:
    while len(children) < 1000:
        child = os.fork()
        if child == 0: signal.pause()
        children.append(child)
except BlockingIOError:
    pass
for child in children: os.kill(child, signal.SIGKILL)
for child in children: os.waitpid(child, 0)
print(len(children))
"""
    assert 100 < int(await inside.run(code)) < 256


async def test_its_processes_dump_no_core_and_have_a_limit_on_open_files(inside: RunnableMachine):
    code = "import resource as r\nprint(*(r.getrlimit(kind)[1] for kind in (r.RLIMIT_CORE, r.RLIMIT_NOFILE)))"
    core, files = map(int, (await inside.run(code)).split())
    assert core == 0
    assert 0 < files <= 4096


async def test_its_memory_cpu_and_processes_are_limited(inside: RunnableMachine):
    groups = groups_of(inside.machine.pid)
    if not groups and os.geteuid() != 0:
        pytest.skip("only root can create cgroups on this host")
    inside.machine.prioritize(CpuPriority.BATCH)
    limits = {
        path.name: path.read_text().split()[0]
        for group in groups
        for path in group.iterdir()
        if "." in path.name and re.search(r"memory\.(max|limit_in_bytes)|pids\.max|cpu\.(max|cfs_quota_us)", path.name)
    }
    memory = int(limits.get("memory.max") or limits["memory.limit_in_bytes"])
    assert SIZE["memory_mb"] * MIB < memory <= (SIZE["memory_mb"] + OVERHEAD_MB) * MIB  # its files included
    assert int(limits["pids.max"]) <= 256
    assert int(limits.get("cpu.max") or limits["cpu.cfs_quota_us"]) == SIZE["vcpus"] * CPU_PERIOD_US
    for pid in with_descendants(inside.machine.pid)[1:]:
        assert groups_of(pid) == groups
