"""How the host confines gVisor, in case code has taken over gVisor's kernel.

A machine is a tree of processes: `unshare`, which creates the namespaces; `runsc`, the first process in them, which
only waits; and below it the sandbox, which is gVisor's kernel, and its stubs, which run the machine's code.
"""

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import anyio
import pytest

from guest.errors import AgentGone
from tests.footprint import groups_of
from tests.functional.machines import Clone, Machines, only
from tests.waiting import promised
from vmm import limits, machine
from vmm.drivers.gvisor import RUNSC, command
from vmm.hierarchy import Hierarchy
from vmm.process_table import children_of, with_descendants
from vmm.types import OVERHEAD_MB, CpuPriority

pytestmark = [pytest.mark.vm, pytest.mark.rights, only("gvisor")]

MIB = 1024 * 1024
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
# Of 512 MB, of which the process that runs code has 90.
NEARLY_ALL = """
with open("/workspace/half", "wb") as file:
    for _ in range(15): file.write(bytes(16 << 20))
import re
left = re.search("MemAvailable: +([0-9]+) kB", open("/proc/meminfo").read())
hoard = b"x" * (int(left[1]) * 1024 - (40 << 20))  # each process counts for 1 MB more
"""
FULL_SOCKETS = """
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
kept, filled = [], 0
while filled < 600 << 20:
    pair = socket.socketpair()
    kept.append(pair)
    time.sleep(0.005)  # 80 MB/s: the server gets to look between what is too much and what the sentry survives
    for end in pair:
        end.setblocking(False)
        try:
            while True:
                filled += end.send(bytes(65536))
        except BlockingIOError:
            pass
"""


@pytest.fixture(autouse=True, scope="module")
def secret() -> Iterator[None]:
    """Put a secret into our environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_SERVER", "token")
        yield


@pytest.fixture
def waiting(shared: Clone) -> int:
    """The first process in the machine's namespaces."""
    [first] = children_of(shared.pid)
    return first


@pytest.fixture
def within(waiting: int) -> list[int]:
    """The processes of gVisor's kernel and of the machine's code."""
    found = with_descendants(waiting)[1:]
    assert len(found) > 1
    return found


def status(pid: int) -> dict[str, str]:
    """Return /proc/PID/status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def starts_from(machines: Machines) -> set[str]:
    """Return the files that machines start from."""
    built = machines.built
    assert built.snapshot is not None
    checkpoint = (built.snapshot.path / "checkpoint").iterdir()
    return {str(built.root), str(machines.host.builder.find_program(RUNSC)), *map(str, checkpoint)}


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give each machine its own user")


def test_all_its_processes_run_as_an_unused_user(shared: Clone):
    needs_root()
    found = [status(pid) for pid in with_descendants(shared.pid)]
    [uid] = {uid for each in found for uid in each["Uid"].split()}
    [gid] = {gid for each in found for gid in each["Gid"].split()}
    assert int(uid) > 1_000_000_000
    assert int(gid) > 1_000_000_000
    assert {each["Groups"] for each in found} == {""}


async def test_every_machine_runs_as_another_user(machines: Machines, shared: Clone):
    needs_root()
    async with machines.clone() as other:
        assert status(shared.pid)["Uid"] != status(other.pid)["Uid"]


def test_no_process_can_gain_privileges(shared: Clone):
    assert {status(pid)["NoNewPrivs"] for pid in with_descendants(shared.pid)} == {"1"}


def test_its_capabilities_are_limited_to_its_own_namespaces(shared: Clone, within: list[int]):
    """Its user namespace contains nothing of the host."""
    ours = Path("/proc/self/ns/user").readlink()
    assert all(Path(f"/proc/{pid}/ns/user").readlink() != ours for pid in with_descendants(shared.pid))
    maps = {tuple(Path(f"/proc/{pid}/uid_map").read_text().split()) for pid in within}
    assert all(length == "1" for _, _, length in maps), "more than its own user is mapped"


def test_every_thread_of_the_sandbox_has_a_seccomp_filter(within: list[int]):
    for pid in within:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            assert re.search(r"^Seccomp:\s+2$", (thread / "status").read_text(), re.MULTILINE), thread


def test_it_shares_no_namespace_with_the_host(waiting: int, within: list[int]):
    for pid in (waiting, *within):
        for kind in NAMESPACES:
            assert Path(f"/proc/{pid}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink(), kind


def test_the_sandbox_shares_no_namespace_with_the_waiting_process(waiting: int, within: list[int]):
    for pid in within:
        for kind in ("user", "mnt", "net", "ipc", "uts"):
            assert Path(f"/proc/{pid}/ns/{kind}").readlink() != Path(f"/proc/{waiting}/ns/{kind}").readlink(), kind


def test_its_network_namespaces_are_empty(shared: Clone, within: list[int]):
    for pid in (shared.pid, *within):
        devices = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] == ["lo"]
        assert Path(f"/proc/{pid}/net/route").read_text().splitlines()[1:] == []
    for pid in within:  # gVisor's control socket is in the namespace of the waiting process
        sockets = [line.split()[-1] for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
        assert not any(name.startswith(("/", "@")) for name in sockets)


def test_the_sandbox_sees_no_file_of_the_host(within: list[int]):
    """Its root is a read-only tmpfs that is nearly empty."""
    for pid in within:
        [mount] = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        _, _, _, _, place, options, *_ = mount.split()
        assert (place, options.split(",")[0]) == ("/", "ro")
        assert "tmpfs runsc-root" in mount
    if os.geteuid() == 0:
        files = [path for path in Path(f"/proc/{within[0]}/root/").rglob("*") if not path.is_dir()]
        assert {path.name for path in files} <= {"hostname", "hosts", "resolv.conf", "localtime"}, files


def test_it_has_nothing_open_but_the_machines_own_files(machines: Machines, shared: Clone):
    """No directory, no writable file of the host, no named socket."""
    made_of, odd = starts_from(machines), []
    for pid in with_descendants(shared.pid):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = str(link.readlink())
            flags = int(re.findall(r"^flags:\s+(\d+)", _fdinfo(pid, link.name), re.MULTILINE)[0], 8)
            if target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/null")):
                continue
            if target in made_of and flags & os.O_ACCMODE == os.O_RDONLY:
                continue
            odd.append((target, flags))
    assert odd == []


def test_the_sandbox_has_no_file_of_the_host_open_but_the_image(machines: Machines, within: list[int]):
    targets = {str(link.readlink()) for pid in within for link in Path(f"/proc/{pid}/fd").iterdir()}
    files = {target for target in targets if target.startswith("/") and not target.startswith("/memfd:")}
    assert files <= {str(machines.built.root), "/dev/null"}


async def test_it_shares_only_read_only_files_with_another_machine(machines: Machines, shared: Clone):
    async with machines.clone() as other:
        names = {name for name, _ in _inodes(shared.pid) & _inodes(other.pid)}
    assert names <= {*starts_from(machines), "/dev/null"}


def test_only_we_can_change_the_files_that_machines_start_from(machines: Machines):
    built = machines.built
    assert built.snapshot is not None
    for path in (built.root, *built.snapshot.path.rglob("*"), machines.host.builder.find_program(RUNSC)):
        assert path is not None
        facts = path.stat()
        assert facts.st_uid == os.geteuid(), path
        assert not facts.st_mode & 0o022, path


def test_its_command_lines_contain_no_path_of_the_host(machines: Machines, shared: Clone):
    """Every file is passed as a descriptor, so the machine needs no permission to open one."""
    for pid in with_descendants(shared.pid):
        assert str(machines.host.settings.home) not in Path(f"/proc/{pid}/cmdline").read_text(), pid


def test_it_does_not_inherit_the_servers_environment(shared: Clone, within: list[int]):
    """API keys are often in the environment of an MCP server."""
    for pid in with_descendants(shared.pid):
        assert b"SECRET_OF_THE_SERVER" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert [pid for pid in within if Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0")] == []


def test_its_memory_cpu_and_processes_are_limited(machines: Machines, shared: Clone):
    groups, size = groups_of(shared.pid), machines.built.template.machine
    shared.machine.prioritize(CpuPriority.BATCH)
    if not groups and os.geteuid() != 0:
        pytest.skip("only root can create cgroups on this host")
    assert all(groups_of(pid) == groups for pid in with_descendants(shared.pid))

    def limit(*names: str) -> list[str]:
        """Return the words of the first file that exists: the cgroup versions have different names."""
        return next(path.read_text().split() for name in names for group in groups if (path := group / name).exists())

    [memory] = limit("memory.max", "memory.limit_in_bytes")
    assert size.memory_mb * MIB < int(memory) <= (size.memory_mb + OVERHEAD_MB) * MIB  # its files included
    [processes] = limit("pids.max")
    assert int(processes) <= command.THREADS
    quota, *period = limit("cpu.max", "cpu.cfs_quota_us")
    assert int(quota) / int((period or limit("cpu.cfs_period_us"))[0]) == size.vcpus


def test_its_processes_dump_no_core_and_have_a_limit_on_file_size(shared: Clone):
    for pid in with_descendants(shared.pid):
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"^Max core file size\s+0\s+0\s", limits, re.MULTILINE)
        assert re.search(r"^Max file size\s+\d+\s+\d+\s", limits, re.MULTILINE)


async def test_without_cgroups_code_cannot_make_the_sentry_as_large_as_it_likes(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
):
    """Data in sockets is in the sentry's own memory, not in the memory file. Here, the server does not get to look."""
    monkeypatch.setattr(limits, "detect", lambda: Hierarchy(None, reason="none in this test"))
    monkeypatch.setattr(machine, "limited", lambda *_: nullcontext())
    async with machines.clone() as clone:
        with pytest.raises(AgentGone):
            await clone.run(FULL_SOCKETS)
        with anyio.fail_after(promised()):
            assert "gVisor's kernel crashed" in str(await clone.machine.wait())


async def test_without_cgroups_the_server_ends_a_machine_that_takes_more_than_its_memory_and_the_overhead(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
):
    """Neither what code has nor what the sentry has is too much, but both together are."""
    monkeypatch.setattr(limits, "detect", lambda: Hierarchy(None, reason="none in this test"))
    async with machines.clone() as clone:
        assert (await clone.run(NEARLY_ALL)).out == ""
        with pytest.raises(AgentGone):
            await clone.run(FULL_SOCKETS)
        with anyio.fail_after(promised()):
            assert "exceeded the host's memory limit" in str(await clone.machine.wait())


def _fdinfo(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/fdinfo/{name}").read_text()


def _inodes(pid: int) -> set[tuple[str, int]]:
    """Return names and inodes of a machine's open files, except the kernel's own, which all processes share."""
    found = set()
    for each in with_descendants(pid):
        for link in Path(f"/proc/{each}/fd").iterdir():
            name = str(link.readlink())
            if not name.startswith("anon_inode:"):
                found.add((name, link.stat().st_ino))
    return found
