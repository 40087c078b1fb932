"""Finding control groups and writing their ceilings, on made-up hosts of both versions and on this one."""

import os
import secrets
from pathlib import Path

import pytest

from vmm import limits
from vmm.limits import ControlGroup, Hierarchy, control_group, detect, settings, start_time, sweep
from vmm.types import Limits

V1 = """\
30 25 0:26 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu
31 25 0:27 / /cg/memory rw,relatime - cgroup cgroup rw,memory
32 25 0:28 / /cg/pids rw,relatime - cgroup cgroup rw,pids
33 25 0:29 / /cg/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "33 25 0:29 / /cg rw,relatime - cgroup2 cgroup2 rw\n"
OWN_V1 = "3:pids:/\n2:memory:/session/7\n1:cpu:/\n0::/\n"
OWN_V2 = "0::/user.slice/app.scope\n"
ALL = Limits(memory_bytes=512, cpus=1.5, pids=64)


def make_v1(root: Path) -> Path:
    for name in ("cpu", "memory/session/7", "pids", "unified"):
        (root / "cg" / name).mkdir(parents=True)
    (root / "cg/unified/cgroup.controllers").write_text("")
    return root


def make_v2(root: Path, controllers: str = "cpuset cpu io memory pids") -> Path:
    """A host where systemd has handed user.slice over and put us into app.scope, where no group can be made."""
    scope = root / "cg/user.slice/app.scope"
    scope.mkdir(parents=True)
    (root / "cg/cgroup.controllers").write_text(controllers)
    (scope / "cgroup.subtree_control").mkdir()  # as unwritable as the kernel makes it for a group with processes
    (root / "cg/user.slice/cgroup.subtree_control").write_text("cpu memory pids")
    return root


def test_a_hybrid_host_whose_v2_has_no_controllers_counts_as_v1(tmp_path):
    found = detect(V1, OWN_V1, root=make_v1(tmp_path))
    assert found.version == 1


def test_groups_are_made_below_our_own_so_that_limits_on_us_hold_for_machines(tmp_path):
    found = detect(V1, OWN_V1, root=make_v1(tmp_path))
    assert set(found.folders) == {
        tmp_path / "cg/memory/session/7/mcp-sandbox",
        tmp_path / "cg/cpu/mcp-sandbox",
        tmp_path / "cg/pids/mcp-sandbox",
    }


def test_on_v2_the_nearest_group_above_us_that_can_have_groups_is_taken(tmp_path):
    found = detect(V2, OWN_V2, root=make_v2(tmp_path))
    assert found == Hierarchy(2, (tmp_path / "cg/user.slice/mcp-sandbox",))


def test_a_host_without_the_pids_controller_is_not_used_and_says_so(tmp_path):
    found = detect(V2, OWN_V2, root=make_v2(tmp_path, "cpu memory"))
    assert not found.usable
    assert "memory, cpu and pids" in found.describe()


def test_a_host_that_lets_us_make_no_group_says_what_it_said(tmp_path):
    root = make_v1(tmp_path)
    for place in ("cpu", "memory/session/7", "memory", "pids"):
        (root / "cg" / place / "mcp-sandbox").write_text("in the way")
    found = detect(V1, OWN_V1, root=root)
    assert not found.usable
    assert "no group can be made: File exists" in found.describe()


def test_both_versions_get_the_same_ceilings_in_their_own_words():
    assert settings(ALL, 2) == {
        "memory.max": "512",
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "pids.max": "64",
    }
    assert settings(ALL, 1) == {
        "memory.limit_in_bytes": "512",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
        "pids.max": "64",
    }


def test_no_limits_write_no_files():
    assert settings(Limits(), 1) == settings(Limits(), 2) == {}


async def test_a_group_that_could_not_be_made_whole_leaves_nothing_behind(tmp_path, monkeypatch):
    hierarchy = detect(V1, OWN_V1, root=make_v1(tmp_path))
    monkeypatch.setattr(limits, "_server", lambda: "1-1")
    last = hierarchy.folders[-1]
    last.rmdir()
    last.write_text("in the way")
    with pytest.raises(FileExistsError):
        async with control_group(hierarchy, "box", Limits()):
            pytest.fail("the group must not be handed out")
    assert [path for folder in hierarchy.folders for path in folder.glob("*-box")] == []


async def test_a_host_without_groups_gives_none():
    async with control_group(Hierarchy(None, reason="none here"), "box", ALL) as group:
        assert group is None


def test_groups_of_killed_servers_are_swept_and_those_of_living_ones_kept(tmp_path):
    folder = tmp_path / "mcp-sandbox"
    me = f"{os.getpid()}-{start_time(os.getpid())}"
    for name in ("999999999-1-dead", f"{os.getpid()}-1-number-used-again", f"{me}-alive", "not-ours"):
        (folder / name).mkdir(parents=True)
    assert set(sweep(Hierarchy(1, (folder,)))) == {"999999999-1-dead", f"{os.getpid()}-1-number-used-again"}
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{me}-alive", "not-ours"])


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("memory.events", "low 0\noom 1\noom_kill 1\n", True),
        ("memory.events", "low 0\noom_kill 0\n", False),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", True),
    ],
)
def test_a_machine_that_ran_out_of_its_memory_can_be_told(tmp_path, monkeypatch, file, text, expected):
    monkeypatch.setattr(limits, "_server", lambda: "1-1")
    (tmp_path / "1-1-box").mkdir()
    (tmp_path / "1-1-box" / file).write_text(text)
    assert ControlGroup(Hierarchy(2, (tmp_path,)), "box").out_of_memory() is expected


@pytest.mark.skipif(not detect().usable, reason=detect().describe())
async def test_a_real_group_takes_a_process_in_and_is_gone_afterwards():
    name = f"test-{secrets.token_hex(4)}"
    hierarchy = detect()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until it is killed
        os._exit(0)
    async with control_group(hierarchy, name, Limits(memory_bytes=64 << 20, cpus=1, pids=10)) as group:
        assert group is not None
        group.add(child)
        assert {path.read_text().strip() for path in _members(hierarchy, name)} == {str(child)}
        os.kill(child, 9)
        os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert _members(hierarchy, name) == []


def _members(hierarchy: Hierarchy, name: str) -> list[Path]:
    return [path for folder in hierarchy.folders for path in folder.glob(f"*-{name}/cgroup.procs")]
