"""Finding control groups and writing their ceilings, on made-up hosts of both versions."""

from pathlib import Path

import pytest

from vmm.limits import ControlGroup, Hierarchy, control_group, detect, settings
from vmm.types import Limits

V1 = """\
30 25 0:26 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu
31 25 0:27 / /cg/memory rw,relatime - cgroup cgroup rw,memory
32 25 0:28 / /cg/pids rw,relatime - cgroup cgroup rw,pids
33 25 0:29 / /cg/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "33 25 0:29 / /cg rw,relatime - cgroup2 cgroup2 rw\n"
ALL = Limits(memory_bytes=512, cpus=1.5, pids=64)


def make_host(root: Path, mountinfo: str, controllers: str = "") -> Path:
    for line in mountinfo.splitlines():
        (root / line.split()[4].lstrip("/")).mkdir(parents=True, exist_ok=True)
    for place in root.rglob("unified"):
        (place / "cgroup.controllers").write_text("")
    if mountinfo == V2:
        (root / "cg/cgroup.controllers").write_text(controllers)
    return root


def test_a_hybrid_host_whose_v2_has_no_controllers_counts_as_v1(tmp_path):
    found = detect(V1, root=make_host(tmp_path, V1))
    assert found.version == 1
    assert found.mounts["memory"] == tmp_path / "cg/memory"


def test_a_v2_host_with_all_controllers_counts_as_v2(tmp_path):
    found = detect(V2, root=make_host(tmp_path, V2, "cpuset cpu io memory pids"))
    assert (found.version, set(found.mounts.values())) == (2, {tmp_path / "cg"})


def test_a_host_without_the_pids_controller_is_not_used_and_says_so(tmp_path):
    found = detect(V2, root=make_host(tmp_path, V2, "cpu memory"))
    assert not found.usable
    assert "memory, cpu and pids" in found.describe()


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


def test_a_version_1_group_is_made_once_per_controller(tmp_path):
    hierarchy = detect(V1, root=make_host(tmp_path, V1))
    group = ControlGroup(hierarchy, "box")
    group.create(Limits())
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("cg/*/mcp-sandbox/box")) == [
        "cg/cpu/mcp-sandbox/box",
        "cg/memory/mcp-sandbox/box",
        "cg/pids/mcp-sandbox/box",
    ]


async def test_a_group_that_could_not_be_made_whole_leaves_nothing_behind(tmp_path):
    hierarchy = detect(V1, root=make_host(tmp_path, V1))
    (tmp_path / "cg/pids/mcp-sandbox").write_text("in the way")
    with pytest.raises(FileExistsError):
        async with control_group(hierarchy, "box", Limits()):
            pytest.fail("the group must not be handed out")
    assert list(tmp_path.glob("cg/*/mcp-sandbox/box")) == []


async def test_a_host_without_groups_gives_none():
    async with control_group(Hierarchy(None, {}, "none here"), "box", ALL) as group:
        assert group is None


@pytest.mark.skipif(not detect().usable, reason=detect().describe())
async def test_a_real_group_takes_a_process_in_and_is_gone_afterwards():
    import os
    import secrets

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
        members = {path.read_text().strip() for path in _members(hierarchy, name)}
        assert members == {str(child)}
        os.kill(child, 9)
        os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert _members(hierarchy, name) == []


def _members(hierarchy: Hierarchy, name: str) -> list[Path]:
    places = {place / "mcp-sandbox" / name / "cgroup.procs" for place in hierarchy.mounts.values()}
    return [place for place in places if place.exists()]
