"""How the host confines the monitor of a virtual machine, in case a guest has taken it over."""

import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.footprint import groups_of
from tests.functional.machines import Clone, Machines, only
from vmm.microvm.layout import AGENT_SOCKET, API_SOCKET
from vmm.process_table import children_of
from vmm.types import OVERHEAD_MB, CpuPriority

pytestmark = [pytest.mark.vm, pytest.mark.rights, only("firecracker", "cloud-hypervisor", "qemu")]

SECCOMP_FILTER = "2"
KVM = Path("/dev/kvm")
DEVICES = ("/dev/null", "/dev/urandom", str(KVM))
MIB = 1024 * 1024


@pytest.fixture(autouse=True, scope="module")
def secret() -> Iterator[None]:
    """Put a secret into our environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_SERVER", "token")
        yield


def monitor_of(clone: Clone) -> int:
    """The process of the monitor, below the one that made its namespaces."""
    [pid] = children_of(clone.pid)
    return pid


@pytest.fixture
def monitor(shared: Clone) -> int:
    return monitor_of(shared)


@pytest.fixture
def status(monitor: int) -> dict[str, str]:
    """/proc/PID/status of the monitor."""
    text = Path(f"/proc/{monitor}/status").read_text()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def program_of(monitor: int) -> str:
    return str(Path(f"/proc/{monitor}/exe").readlink())


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give each machine its own user")


def test_it_runs_as_an_unused_user(status: dict[str, str]):
    needs_root()
    uids, gids = set(status["Uid"].split()), set(status["Gid"].split())
    assert len(uids) == len(gids) == 1
    assert int(uids.pop()) > 1_000_000_000
    assert int(gids.pop()) > 1_000_000_000
    assert set(status["Groups"].split()) <= {str(KVM.stat().st_gid) if KVM.exists() else ""}  # to open that device


async def test_every_machine_runs_as_another_user(machines: Machines, shared: Clone):
    needs_root()
    async with machines.clone() as other:
        assert Path(f"/proc/{shared.pid}").stat().st_uid != Path(f"/proc/{other.pid}").stat().st_uid


def test_it_has_no_capabilities_and_can_gain_none(status: dict[str, str]):
    kinds = ["CapInh", "CapPrm", "CapEff", "CapAmb", "CapBnd"]
    assert {kind: int(status[kind], 16) for kind in kinds} == dict.fromkeys(kinds, 0)
    assert status["NoNewPrivs"] == "1"


def test_every_thread_has_a_seccomp_filter(machines: Machines, monitor: int, status: dict[str, str]):
    driver = machines.host.driver.name
    if driver == "firecracker" and status["Seccomp"] != SECCOMP_FILTER:
        pytest.skip("this Firecracker was built without its filters; official releases have them")
    threads = {thread.name: thread for thread in Path(f"/proc/{monitor}/task").iterdir()}
    if driver == "cloud-hypervisor":
        threads.pop(str(monitor))  # the first one only waits for the others
    assert threads
    for thread in threads.values():
        assert re.search(r"^Seccomp:\s+2$", (thread / "status").read_text(), re.MULTILINE), thread


def test_it_shares_no_namespace_with_the_host(monitor: int):
    for kind in ("user", "mnt", "pid", "net", "ipc", "uts"):
        assert Path(f"/proc/{monitor}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink()


def test_it_is_in_an_empty_network_namespace(monitor: int):
    devices = Path(f"/proc/{monitor}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    assert Path(f"/proc/{monitor}/net/route").read_text().splitlines()[1:] == []
    sockets = [line.split()[-1] for line in Path(f"/proc/{monitor}/net/unix").read_text().splitlines()[1:]]
    named = {name for name in sockets if name.startswith(("/", "@"))}
    assert named <= {f"/{API_SOCKET}", f"/{AGENT_SOCKET}"}  # in its own root directory


def test_its_memory_cpu_and_processes_are_limited(machines: Machines, shared: Clone, monitor: int):
    groups, size = groups_of(monitor), machines.built.template.machine
    shared.machine.prioritize(CpuPriority.BATCH)
    if not groups and os.geteuid() != 0:
        pytest.skip("only root can create cgroups on this host")

    def limit(*names: str) -> list[str]:
        """Return the words of the first file that exists: the cgroup versions have different names."""
        return next(path.read_text().split() for name in names for group in groups if (path := group / name).exists())

    [memory] = limit("memory.max", "memory.limit_in_bytes")
    assert size.memory_mb * MIB < int(memory) <= (size.memory_mb + OVERHEAD_MB) * MIB
    [processes] = limit("pids.max")
    assert int(processes) <= 128
    quota, period = limit("cpu.max") if _version_2(groups) else limit("cpu.cfs_quota_us") + limit("cpu.cfs_period_us")
    assert int(quota) / int(period) == size.vcpus


def test_it_dumps_no_core_and_has_per_process_limits_without_a_cgroup(monitor: int):
    limits = Path(f"/proc/{monitor}/limits").read_text()
    assert re.search(r"^Max core file size\s+0\s+0\s", limits, re.MULTILINE)
    if not groups_of(monitor):
        assert re.search(r"^Max data size\s+\d+\s+\d+\s", limits, re.MULTILINE)
        assert re.search(r"^Max processes\s+(64\s+64|96\s+96)\s", limits, re.MULTILINE)


def _version_2(groups: list[Path]) -> bool:
    return any((group / "cpu.max").exists() for group in groups)


def test_it_has_nothing_open_but_the_machines_own_files(machines: Machines, monitor: int):
    """No directory, no writable file of the host, no socket to others."""
    odd = []
    for link in Path(f"/proc/{monitor}/fd").iterdir():
        target = str(link.readlink())
        flags = int(re.findall(r"^flags:\s+(\d+)", _fdinfo(monitor, link.name), re.MULTILINE)[0], 8)
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:", f"/{API_SOCKET}", *DEVICES)):
            continue
        if target.startswith(str(machines.host.settings.run_dir)) and target.endswith("(deleted)"):
            continue  # its disk
        if target in (str(machines.built.root), program_of(monitor)) and not writable:
            continue
        odd.append((target, flags))
    assert odd == []


async def test_it_shares_only_sealed_memory_and_the_image_with_another_machine(machines: Machines, shared: Clone):
    async with machines.clone() as other:
        names = {name for name, *_ in _inodes(monitor_of(shared)) & _inodes(monitor_of(other))}
    program = program_of(monitor_of(shared))
    assert names <= {"/memfd:machine (deleted)", str(machines.built.root), program, *DEVICES}


def test_not_even_root_can_change_the_shared_memory(monitor: int):
    links = [link for link in Path(f"/proc/{monitor}/fd").iterdir() if "/memfd:machine" in str(link.readlink())]
    assert links
    for link in links:
        memory = os.open(link, os.O_RDWR)
        try:
            _assert_sealed(memory)
        finally:
            os.close(memory)


def _assert_sealed(memory: int) -> None:
    size = os.fstat(memory).st_size
    with pytest.raises(PermissionError) as refusal:
        os.pwrite(memory, b"evil", 0)
    assert refusal.value.errno == errno.EPERM
    for wanted in (0, 2 * size):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, wanted)
    with pytest.raises(PermissionError):
        mmap.mmap(memory, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


def test_its_command_line_contains_no_path_of_the_host(machines: Machines, monitor: int):
    """Every file is passed as a descriptor, so the machine needs no permission to open one."""
    command = Path(f"/proc/{monitor}/cmdline").read_bytes().decode()
    assert str(machines.host.settings.home) not in command
    if machines.host.driver.name == "qemu":
        assert "-sandbox\0on" in command
    for word in ("-netdev", "netdev=", "vsock", "-fsdev", "virtfs"):  # its network card is connected to nothing
        assert word not in command


def test_it_does_not_inherit_the_servers_environment(monitor: int):
    """API keys are often in the environment of an MCP server."""
    names = {line.partition(b"=")[0] for line in Path(f"/proc/{monitor}/environ").read_bytes().split(b"\0")}
    assert b"SECRET_OF_THE_SERVER" not in names


def _fdinfo(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/fdinfo/{name}").read_text()


def _inodes(pid: int) -> set[tuple[str, int, int]]:
    """Return names and inodes of a process's open files, except the kernel's own, which all processes share."""
    found: set[tuple[str, int, int]] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        name = str(link.readlink())
        if not name.startswith("anon_inode:"):
            found.add((name, link.stat().st_dev, link.stat().st_ino))
    return found
