"""Finding cgroups and writing their limits, on made-up hosts of both versions and on this one."""

import secrets
import signal
from pathlib import Path

import anyio
import pytest

from vmm import limits
from vmm.hierarchy import Hierarchy, detect, find, server, with_scopes
from vmm.limits import OwnGroup, SystemdScope, control_group, cpu_settings, rlimit_argv, settings, sweep
from vmm.process import Confinement, probe_child, spawn
from vmm.scopes import find_manager
from vmm.types import CpuPriority, Limits

V1 = """\
30 25 0:26 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu
31 25 0:27 / /cg/memory rw,relatime - cgroup cgroup rw,memory
32 25 0:28 / /cg/pids rw,relatime - cgroup cgroup rw,pids
33 25 0:29 / /cg/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "33 25 0:29 / /cg rw,relatime - cgroup2 cgroup2 rw\n"
OWN_V1 = "3:pids:/\n2:memory:/session/7\n1:cpu:/\n0::/\n"
OWN_V2 = "0::/user.slice/app.scope\n"
MEMORY_LIMITS = {"memory.limit_in_bytes": "", "memory.memsw.limit_in_bytes": "", "memory.max": ""}
ALL = Limits(memory_bytes=512, cpus=1.5, pids=64)


def make_v1(root: Path) -> Path:
    for name in ("cpu", "memory/session/7", "pids", "unified"):
        (root / "cg" / name).mkdir(parents=True)
    (root / "cg/unified/cgroup.controllers").write_text("")
    return root


def make_v2(root: Path, controllers: str = "cpuset cpu io memory pids") -> Path:
    """A host whose systemd has delegated user.slice and put us into app.scope, which cannot contain cgroups."""
    scope = root / "cg/user.slice/app.scope"
    scope.mkdir(parents=True)
    (root / "cg/cgroup.controllers").write_text(controllers)
    (scope / "cgroup.subtree_control").mkdir()  # not writable, as for a cgroup with processes
    (root / "cg/user.slice/cgroup.subtree_control").write_text("cpu memory pids")
    return root


def try_folder(folder: Path) -> None:
    """Act as a kernel that accepts every process."""
    (folder / "probe").mkdir()
    (folder / "probe").rmdir()


def test_a_hybrid_host_whose_v2_has_no_controllers_uses_v1(tmp_path):
    found = find(V1, OWN_V1, root=make_v1(tmp_path), try_folder=try_folder)
    assert found.version == 1


def test_cgroups_are_below_our_own_so_that_limits_on_us_hold_for_machines(tmp_path):
    found = find(V1, OWN_V1, root=make_v1(tmp_path), try_folder=try_folder)
    assert set(found.folders) == {
        tmp_path / "cg/memory/session/7/mcp-sandbox",
        tmp_path / "cg/cpu/mcp-sandbox",
        tmp_path / "cg/pids/mcp-sandbox",
        tmp_path / "cg/unified/mcp-sandbox",  # for freezing
    }


def test_on_v2_the_nearest_ancestor_that_can_contain_cgroups_is_used(tmp_path):
    found = find(V2, OWN_V2, root=make_v2(tmp_path), try_folder=try_folder)
    assert found == Hierarchy(2, (tmp_path / "cg/user.slice/mcp-sandbox",))


def test_a_host_without_the_pids_controller_is_not_usable(tmp_path):
    found = find(V2, OWN_V2, root=make_v2(tmp_path, "cpu memory"), try_folder=try_folder)
    assert not found.usable
    assert "memory, cpu and pids" in found.describe()


def test_the_reason_has_the_error_of_creating_a_cgroup(tmp_path):
    root = make_v1(tmp_path)
    for place in ("cpu", "memory/session/7", "memory", "pids"):
        (root / "cg" / place / "mcp-sandbox").write_text("not a directory")
    found = find(V1, OWN_V1, root=root, try_folder=try_folder)
    assert not found.usable
    assert "no process can be moved into a new cgroup: File exists" in found.describe()


def test_a_folder_whose_cgroups_accept_no_process_is_not_used(tmp_path):
    """As in a login session: the user may not write to the cgroups above, which moving a process requires."""

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    found = find(V2, OWN_V2, root=make_v2(tmp_path), try_folder=refuse)
    assert not found.usable
    assert "Permission denied" in found.reason


def test_both_versions_get_the_same_limits_in_their_own_files():
    assert settings(ALL, 2) == {
        "memory.max": "512",
        "memory.swap.max": "0",
        "cpu.weight": "100",
        "cpu.max": "25000 10000",
        "pids.max": "64",
    }
    assert settings(ALL, 1) == {
        "memory.limit_in_bytes": "512",
        "memory.memsw.limit_in_bytes": "512",
        "cpu.shares": "1024",
        "cpu.cfs_period_us": "10000",
        "cpu.cfs_quota_us": "25000",
        "pids.max": "64",
    }


@pytest.mark.parametrize(
    ("version", "weight", "quota"),
    [
        (2, "cpu.weight", {"cpu.max": "2500 10000"}),
        (1, "cpu.shares", {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "2500"}),
    ],
)
def test_a_machine_that_is_not_in_use_gets_less_cpu_until_it_is_used_again(
    tmp_path, monkeypatch, version, weight, quota
):
    monkeypatch.setattr(limits, "server", lambda: "1-1")
    group = OwnGroup(ALL, Hierarchy(version, (tmp_path,)), "box")
    [directory] = group.directories()
    directory.mkdir()
    used = cpu_settings(ALL.cpus, CpuPriority.INTERACTIVE, version)
    for name in used:
        (directory / name).touch()

    def written() -> dict[str, str]:
        return {file.name: file.read_text() for file in directory.iterdir()}

    group.prioritize(CpuPriority.UNUSED)
    assert written() == {weight: str(int(used[weight]) * 4 // 100), **quota}
    group.prioritize(CpuPriority.INTERACTIVE)
    assert written() == used
    (directory / weight).write_text("as it was")
    group.prioritize(CpuPriority.INTERACTIVE)  # writes nothing: files of cgroups are slow
    assert written() == {**used, weight: "as it was"}


def test_a_machine_has_one_cpu_more_while_it_starts_and_in_a_short_use_but_not_in_a_long_one():
    quotas = {priority: cpu_settings(1.5, priority, 2)["cpu.max"] for priority in CpuPriority}
    assert quotas == {
        CpuPriority.STARTING: "25000 10000",
        CpuPriority.INTERACTIVE: "25000 10000",
        CpuPriority.BATCH: "15000 10000",
        CpuPriority.UNUSED: "2500 10000",
    }


def test_the_priority_of_a_machine_that_has_just_ended_is_not_set(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "server", lambda: "1-1")
    OwnGroup(ALL, Hierarchy(2, (tmp_path,)), "box").prioritize(CpuPriority.UNUSED)
    assert list(tmp_path.iterdir()) == []


def test_all_machines_together_weigh_less_than_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "server", lambda: "1-1")
    (tmp_path / "cpu.shares").write_text("1024")
    OwnGroup(ALL, Hierarchy(1, (tmp_path,)), "box").create()
    assert (tmp_path / "cpu.shares").read_text() == "512"


@pytest.mark.parametrize("version", [1, 2])
def test_a_machine_gets_more_memory_for_a_while(tmp_path, monkeypatch, version):
    monkeypatch.setattr(limits, "server", lambda: "1-1")
    group = OwnGroup(ALL, Hierarchy(version, (tmp_path,)), "box")
    [directory] = group.directories()
    directory.mkdir()
    usual, wide = limits.memory_settings(512, version), limits.memory_settings(1536, version)
    for name in usual:
        (directory / name).touch()

    def written() -> dict[str, str]:
        return {file.name: file.read_text() for file in directory.iterdir()}

    with group.widened(1024):
        assert written() == wide
    assert written() == usual


@pytest.mark.skipif(detect().version is None, reason=detect().describe())
async def test_this_hosts_kernel_takes_a_wider_limit_and_the_usual_one_again():
    usual = 64 * 1024 * 1024
    async with control_group(detect(), secrets.token_hex(4), Limits(memory_bytes=usual)) as group:
        files = [path for place in group.directories() for path, _ in limits.in_directory(place, MEMORY_LIMITS)]
        with group.widened(usual):
            assert {file.read_text().strip() for file in files} == {str(2 * usual)}
        assert {file.read_text().strip() for file in files} == {str(usual)}


async def test_a_machine_that_keeps_the_memory_it_got_for_a_while_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "server", lambda: "1-1")
    group = OwnGroup(ALL, Hierarchy(1, (tmp_path,)), "box")
    [directory] = group.directories()
    directory.mkdir()
    with anyio.fail_after(10):
        async with spawn(["sleep", "60"], confinement=Confinement()) as process:
            (directory / "cgroup.procs").write_text(str(process.pid))
            with pytest.raises(IsADirectoryError), group.widened(1024):
                (directory / "memory.limit_in_bytes").mkdir()  # in place of a kernel that refuses the limit
            assert (await process.wait()).signal == signal.SIGKILL


def test_no_limits_write_no_files():
    assert settings(Limits(), 1) == settings(Limits(), 2) == {}


async def test_a_cgroup_that_could_not_be_created_completely_is_removed(tmp_path, monkeypatch):
    hierarchy = find(V1, OWN_V1, root=make_v1(tmp_path), try_folder=try_folder)
    monkeypatch.setattr(limits, "server", lambda: "1-1")
    last = hierarchy.folders[-1]
    last.rmdir()
    last.write_text("not a directory")
    with pytest.raises(FileExistsError):
        async with control_group(hierarchy, "box", Limits()):
            pytest.fail("the block must not run")
    assert [path for folder in hierarchy.folders for path in folder.glob("*-box")] == []


async def test_without_cgroups_each_process_has_limits():
    bounded = Limits(memory_bytes=512, pids=64, file_bytes=4096, data_bytes=1 << 30, own_user=True)
    async with control_group(Hierarchy(None, reason="none here"), "box", bounded) as group:
        argv = group.wrap(["cat", "/proc/self/limits"])
        assert argv[:3] == ["nice", "-n", str(limits.NICENESS)]
        assert await group.freeze() is False
        with anyio.fail_after(10):
            async with spawn(argv, confinement=Confinement(), before_start=group.add) as process:
                await process.wait()
        assert group.out_of_memory() is False
    assert in_force(process.tail) == {
        "Max core file size": "0",
        "Max file size": "4096",
        "Max data size": str(1 << 30),
        "Max processes": "64",
    }


def in_force(limits: str) -> dict[str, str]:
    """Return the limits in /proc/PID/limits that we may set."""
    names = ("Max core file size", "Max file size", "Max data size", "Max processes")
    return {name: line[len(name) :].split()[0] for line in limits.splitlines() for name in names if name in line}


def test_with_a_cgroup_only_the_file_size_is_limited_per_process():
    bounded = Limits(memory_bytes=512, pids=64, file_bytes=4096, data_bytes=1 << 30, own_user=True)
    assert OwnGroup(bounded, Hierarchy(2), "box").wrap(["qemu"]) == ["prlimit", "--core=0", "--fsize=4096", "qemu"]


def test_on_an_old_kernel_the_number_of_processes_is_not_limited_per_user(monkeypatch):
    monkeypatch.setattr(limits, "nproc_is_per_machine", lambda: False)
    assert rlimit_argv(processes=64) == ["prlimit", "--core=0"]


def test_a_systemd_scope_has_the_same_limits_and_hides_the_session_from_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "server", lambda: "1-1")
    assert SystemdScope(ALL, tmp_path, "box").wrap(["qemu", "-M"]) == [
        *("env", f"XDG_RUNTIME_DIR={tmp_path}", "systemd-run", "--user", "--scope", "--quiet", "--collect"),
        *("--unit=mcp-sandbox-1-1-box", "--property=MemoryMax=512", "--property=MemorySwapMax=0"),
        *("--property=CPUQuota=150%", "--property=CPUQuotaPeriodSec=10000us", "--property=TasksMax=64", "--"),
        *("env", "--unset=XDG_RUNTIME_DIR", "prlimit", "--core=0", "qemu", "-M"),
    ]


def test_a_user_with_a_systemd_session_gets_scopes(tmp_path):
    none = Hierarchy(None, reason="cgroup v2 is mounted, but not writable")
    found = with_scopes(none, tmp_path, {"memory", "pids", "io"})
    assert found.usable
    assert found.describe() == "systemd user scopes: memory, pids"
    assert "no host-side limit on cpu" in str(found.gap())
    assert with_scopes(none, tmp_path, {"memory", "pids", "cpu"}).gap() is None


def test_a_systemd_whose_scopes_do_not_limit_memory_is_not_used(tmp_path):
    none = Hierarchy(None, reason="cgroup v2 is mounted, but not writable")
    found = with_scopes(none, tmp_path, {"pids"})
    assert found is none
    assert "cgroup v2 is mounted, but not writable" in str(found.gap())


@pytest.mark.parametrize(("socket", "found"), [("systemd/private", True), ("bus", True), ("other", False)])
def test_the_users_systemd_is_found_by_its_sockets(tmp_path, monkeypatch, socket, found):
    monkeypatch.setattr("vmm.scopes.find_tool", lambda program: f"/usr/bin/{program}")
    (tmp_path / socket).parent.mkdir(exist_ok=True)
    (tmp_path / socket).touch()
    assert find_manager({"XDG_RUNTIME_DIR": str(tmp_path)}) == (tmp_path if found else None)


def test_a_host_without_systemd_has_no_manager(tmp_path, monkeypatch):
    monkeypatch.setattr("vmm.scopes.find_tool", lambda program: None)
    (tmp_path / "bus").touch()
    assert find_manager({"XDG_RUNTIME_DIR": str(tmp_path)}) is None


def test_cgroups_of_dead_servers_are_swept_whatever_their_home_and_all_others_kept(tmp_path):
    folder = tmp_path / "mcp-sandbox"
    pid, start, namespace = server().split("-")
    dead = {f"999999999-1-{namespace}-dead", f"{pid}-1-{namespace}-number-used-again"}
    kept = {f"{pid}-{start}-{namespace}-alive", "999999999-1-1-in-another-container", "not-ours"}
    for name in dead | kept:
        (folder / name).mkdir(parents=True)
    assert set(sweep([folder])) == dead
    assert {path.name for path in folder.iterdir()} == kept


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("memory.events", "low 0\noom 1\noom_kill 1\n", True),
        ("memory.events", "low 0\noom_kill 0\n", False),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", True),
    ],
)
def test_a_machine_that_exceeded_its_memory_limit_is_recognized(tmp_path, monkeypatch, file, text, expected):
    monkeypatch.setattr(limits, "server", lambda: "1-1")
    (tmp_path / "1-1-box").mkdir()
    (tmp_path / "1-1-box" / file).write_text(text)
    assert OwnGroup(ALL, Hierarchy(2, (tmp_path,)), "box").out_of_memory() is expected


@pytest.mark.skipif(detect().version is None, reason=detect().describe())
async def test_a_real_cgroup_accepts_and_freezes_a_process_and_is_removed():
    name = f"test-{secrets.token_hex(4)}"
    hierarchy = detect()
    with probe_child(["cat"]) as child:
        async with control_group(hierarchy, name, Limits(memory_bytes=64 << 20, cpus=1, pids=10)) as group:
            group.add(child.pid)
            assert {path.read_text().strip() for path in _members(hierarchy, name)} == {str(child.pid)}
            if await group.freeze():
                await group.thaw()
                assert child.communicate(b"running", timeout=10)[0] == b"running"
    assert _members(hierarchy, name) == []


@pytest.mark.skipif(detect().version is None, reason=detect().describe())
async def test_a_frozen_process_can_still_be_killed():
    """Otherwise a machine that is paused when its server is killed would never end."""
    async with control_group(detect(), f"test-{secrets.token_hex(4)}", Limits()) as group:
        with probe_child(["cat"]) as child:
            group.add(child.pid)
            await group.freeze()
            child.kill()
            assert child.wait(timeout=10) == -signal.SIGKILL


def _members(hierarchy: Hierarchy, name: str) -> list[Path]:
    return [path for folder in hierarchy.folders for path in folder.glob(f"*-{name}/cgroup.procs")]
