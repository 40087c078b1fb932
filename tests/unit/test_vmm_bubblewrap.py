"""The bubblewrap driver's probe, and the command that starts a machine."""

import os
from pathlib import Path

import pytest

from vmm import limits, seccomp
from vmm.drivers.bubblewrap import command, probe
from vmm.probe import UIDS
from vmm.process import SHOWN, Confinement
from vmm.types import GuestCode, MachineSpec, Probe

SPEC = MachineSpec("box", Path("/home/me/tree"), GuestCode(Path("/agent.tar")), memory_mb=64, vcpus=2, disk_mb=100)
NO_GROUPS = limits.Hierarchy(None, reason="this host has no cgroups")


@pytest.fixture
def bwrap(tmp_path: Path, monkeypatch) -> Path:
    """The path of a fake bubblewrap that a test writes."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "bwrap"


def write_fake(bwrap: Path, script: str, version: str = "bubblewrap 0.8.0") -> None:
    bwrap.parent.chmod(0o755)
    bwrap.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\n{script}\n')
    bwrap.chmod(0o755)


async def verdict(bwrap: Path, script: str, version: str = "bubblewrap 0.8.0") -> Probe:
    write_fake(bwrap, script, version)
    return await probe.probe(NO_GROUPS)


@pytest.fixture
def reachable(tmp_path, monkeypatch) -> None:
    """Run machines as the current user: another one cannot reach the tests' scratch directory."""
    monkeypatch.setattr(probe, "confinement", lambda tree: Confinement(offline=False))


async def test_the_fix_on_a_host_without_bubblewrap_installs_it(monkeypatch):
    monkeypatch.setattr(probe, "find_tool", lambda program: None)
    found = await probe.probe(NO_GROUPS)
    assert (found.usable, found.reason, found.fix) == (False, "bwrap is not installed", "apt-get install bubblewrap")


async def test_an_old_bubblewrap_is_not_usable(bwrap):
    found = await verdict(bwrap, "exit 1", version="bubblewrap 0.6.1")
    assert not found.usable
    assert found.reason == "bubblewrap 0.6.1 is too old"


@pytest.mark.usefixtures("reachable")
async def test_the_reason_has_the_error_of_a_machine_that_does_not_start(bwrap):
    found = await verdict(bwrap, "echo bwrap: No permissions to create new namespace >&2; exit 1")
    assert not found.usable
    assert "No permissions to create new namespace" in found.reason
    assert found.fix
    assert found.version == "bubblewrap 0.8.0"


@pytest.mark.usefixtures("reachable")
async def test_a_machine_that_prints_nothing_makes_the_driver_unusable(bwrap):
    assert not (await verdict(bwrap, "exit 0")).usable


@pytest.mark.usefixtures("reachable")
async def test_a_machine_that_hangs_makes_the_driver_unusable(bwrap, monkeypatch):
    monkeypatch.setattr(probe, "DEADLINE_S", 0.1)
    found = await verdict(bwrap, "exec sleep 1000")
    assert not found.usable
    assert "did not end" in found.reason


@pytest.mark.usefixtures("reachable")
async def test_without_libseccomp_the_driver_is_not_usable(bwrap, monkeypatch):
    monkeypatch.setattr(seccomp, "LIBRARY", "libnowhere.so.0")
    seccomp.filters.cache_clear()
    seccomp._library.cache_clear()
    found = await verdict(bwrap, f"echo {probe.PROBE_WORD}")
    assert not found.usable
    assert "libnowhere.so.0" in found.reason
    assert found.fix == "apt-get install libseccomp2"


@pytest.mark.usefixtures("reachable")
async def test_a_usable_driver_lists_missing_protections(bwrap):
    found = await verdict(bwrap, f"echo {probe.PROBE_WORD}")
    assert found.usable
    assert any("kernel" in line for line in found.missing_protections)
    assert any("this host has no cgroups" in line for line in found.missing_protections)


def options(box: command.Box) -> list[str]:
    """Return the options that bubblewrap reads from its file."""
    with command.prepared("bwrap", box, ["true"]) as start:
        assert start.argv[:2] == ["bwrap", "--args"]
        assert start.argv[3:] == ["--", "true"]
        file = int(start.argv[2])
        assert file in start.files
        return os.pread(file, 1 << 20, 0).decode().split("\0")


def test_a_machine_shares_nothing_with_the_host_but_its_tree():
    found = options(command.machine_box(SPEC, "/tree"))
    assert {"--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"} <= set(found)
    assert not {"--share-net", "--bind", "--dev-bind", "--cap-add"} & set(found)
    binds = [found[at + 1] for at, word in enumerate(found) if word == "--ro-bind"]
    assert set(binds) == {"/tree", "/dev/null", "/proc/sys"}  # the last to make it read-only
    assert found.count("--add-seccomp-fd") == 2


def test_every_writable_file_system_has_a_size():
    found = options(command.machine_box(SPEC, "/tree"))
    mounts = [at for at, word in enumerate(found) if word == "--tmpfs"]
    assert all("--size" in found[at - 4 : at] for at in mounts)
    assert {"/workspace", "/tmp", "/var/tmp", "/run", "/dev/shm"} <= {found[at + 1] for at in mounts}


def test_the_files_of_a_command_are_closed_with_its_block():
    before = set(os.listdir("/proc/self/fd"))
    with command.prepared("bwrap", command.probe_box("/usr"), ["true"]) as start:
        assert {str(file) for file in start.files} <= set(os.listdir("/proc/self/fd"))
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_seccomp_filters_compile_for_this_architecture():
    for bytecode in seccomp.filters():
        assert bytecode
        assert len(bytecode) % 8 == 0  # the size of an instruction
        assert len(bytecode) // 8 <= 4096  # the kernel's limit


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts the tree elsewhere")
def test_root_mounts_the_tree_where_the_machines_user_can_reach_it():
    confined = probe.confinement(SPEC.root)
    assert confined.uid in UIDS
    assert probe.place_of(SPEC.root, confined) == SHOWN


def test_an_ordinary_user_needs_no_such_mount(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    confined = probe.confinement(SPEC.root)
    assert (confined.uid, probe.place_of(SPEC.root, confined)) == (None, str(SPEC.root))


def test_processes_are_limited_only_where_the_kernel_counts_them_per_machine(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for release, counted in (("5.10.0-28-amd64", False), ("5.14.0", True), ("6.1.0-13-amd64", True)):
        monkeypatch.setattr(os, "uname", lambda release=release: _Uname(release))
        assert limits.nproc_is_per_machine() is counted


def test_symlinks_in_proc_are_not_masked(tmp_path, monkeypatch):
    (tmp_path / "device-tree").symlink_to("/sys/firmware/devicetree/base")
    (tmp_path / "kcore").write_text("")
    monkeypatch.setattr(command, "PROC", tmp_path)
    assert command._masks() == ["--ro-bind", "/dev/null", str(tmp_path / "kcore")]


class _Uname:
    def __init__(self, release: str) -> None:
        self.release = release
