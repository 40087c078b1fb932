"""The bubblewrap driver's verdict on a host, and the command it starts machines with."""

import os
from pathlib import Path

import pytest

from vmm import limits, seccomp
from vmm.drivers.bubblewrap import command, probe
from vmm.probe import UIDS
from vmm.process import SHOWN, Confinement
from vmm.types import GuestCode, MachineSpec, Probe

SPEC = MachineSpec("box", Path("/home/me/tree"), GuestCode(Path("/agent.tar")), memory_mb=64, vcpus=2, disk_mb=100)
NO_GROUPS = limits.Hierarchy(None, reason="this host has no control groups")


@pytest.fixture
def bwrap(tmp_path: Path, monkeypatch) -> Path:
    """A bubblewrap that only pretends; a test says how."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "bwrap"


def pretend(bwrap: Path, script: str, version: str = "bubblewrap 0.8.0") -> None:
    bwrap.parent.chmod(0o755)
    bwrap.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\n{script}\n')
    bwrap.chmod(0o755)


async def verdict(bwrap: Path, script: str, version: str = "bubblewrap 0.8.0") -> Probe:
    pretend(bwrap, script, version)
    return await probe.probe(NO_GROUPS)


@pytest.fixture
def reachable(tmp_path, monkeypatch) -> None:
    """A machine's user cannot get at the tests' scratch directory, so that user is us here."""
    monkeypatch.setattr(probe, "confinement", lambda tree: Confinement(offline=False))


async def test_a_host_without_bubblewrap_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setattr(probe, "find_tool", lambda program: None)
    told = await probe.probe(NO_GROUPS)
    assert (told.usable, told.reason, told.fix) == (False, "bwrap is not installed", "apt-get install bubblewrap")


async def test_a_bubblewrap_that_lacks_what_we_need_is_too_old(bwrap):
    told = await verdict(bwrap, "exit 1", version="bubblewrap 0.6.1")
    assert not told.usable
    assert told.reason == "bubblewrap 0.6.1 is too old"


@pytest.mark.usefixtures("reachable")
async def test_a_machine_that_does_not_start_is_the_reason(bwrap):
    told = await verdict(bwrap, "echo bwrap: No permissions to create new namespace >&2; exit 1")
    assert not told.usable
    assert "No permissions to create new namespace" in told.reason
    assert told.fix
    assert told.version == "bubblewrap 0.8.0"


@pytest.mark.usefixtures("reachable")
async def test_a_machine_that_says_nothing_is_no_machine(bwrap):
    assert not (await verdict(bwrap, "exit 0")).usable


@pytest.mark.usefixtures("reachable")
async def test_a_machine_that_hangs_is_given_up(bwrap, monkeypatch):
    monkeypatch.setattr(probe, "DEADLINE_S", 0.1)
    told = await verdict(bwrap, "exec sleep 1000")
    assert not told.usable
    assert "did not end" in told.reason


@pytest.mark.usefixtures("reachable")
async def test_without_its_filter_there_is_no_machine(bwrap, monkeypatch):
    monkeypatch.setattr(seccomp, "LIBRARY", "libnowhere.so.0")
    seccomp.filters.cache_clear()
    seccomp._library.cache_clear()
    told = await verdict(bwrap, f"echo {probe.PROBE_WORD}")
    assert not told.usable
    assert "libnowhere.so.0" in told.reason
    assert told.fix == "apt-get install libseccomp2"


@pytest.mark.usefixtures("reachable")
async def test_a_usable_driver_says_what_it_lacks(bwrap):
    told = await verdict(bwrap, f"echo {probe.PROBE_WORD}")
    assert told.usable
    assert any("kernel" in line for line in told.limits)
    assert any("this host has no control groups" in line for line in told.limits)


def options(box: command.Box) -> list[str]:
    """The options bubblewrap would read from its file."""
    with command.prepared("bwrap", box, ["true"]) as start:
        assert start.argv[:2] == ["bwrap", "--args"]
        assert start.argv[3:] == ["--", "true"]
        file = int(start.argv[2])
        assert file in start.files
        return os.pread(file, 1 << 20, 0).decode().split("\0")


def test_a_machine_shares_nothing_and_can_get_nothing():
    told = options(command.machine_box(SPEC, "/tree"))
    assert {"--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"} <= set(told)
    assert not {"--share-net", "--bind", "--dev-bind", "--cap-add"} & set(told)
    binds = [told[at + 1] for at, word in enumerate(told) if word.startswith("--ro-bind")]
    assert set(binds) == {"/tree", "/dev/null"}
    assert told.count("--add-seccomp-fd") == 2


def test_every_file_system_a_machine_can_write_to_has_a_size():
    told = options(command.machine_box(SPEC, "/tree"))
    mounts = [at for at, word in enumerate(told) if word == "--tmpfs"]
    assert all("--size" in told[at - 4 : at] for at in mounts)
    assert {"/workspace", "/tmp", "/var/tmp", "/run", "/dev/shm"} <= {told[at + 1] for at in mounts}


def test_the_files_of_a_command_are_closed_after_it():
    before = set(os.listdir("/proc/self/fd"))
    with command.prepared("bwrap", command.probe_box("/usr"), ["true"]) as start:
        assert {str(file) for file in start.files} <= set(os.listdir("/proc/self/fd"))
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_filter_is_a_program_for_this_architecture():
    for program in seccomp.filters():
        assert program
        assert len(program) % 8 == 0  # one instruction of the kernel's
        assert len(program) // 8 <= 4096  # the most the kernel takes


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs to be shown a tree")
def test_root_shows_the_tree_to_a_machine_that_could_not_get_at_it():
    confined = probe.confinement(SPEC.root)
    assert confined.uid in UIDS
    assert probe.place_of(SPEC.root, confined) == SHOWN


def test_a_user_needs_no_such_help(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    confined = probe.confinement(SPEC.root)
    assert (confined.uid, probe.place_of(SPEC.root, confined)) == (None, str(SPEC.root))


def test_processes_are_only_counted_where_the_count_is_the_machines_own(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for release, counted in (("5.10.0-28-amd64", False), ("5.14.0", True), ("6.1.0-13-amd64", True)):
        monkeypatch.setattr(os, "uname", lambda release=release: _Uname(release))
        assert limits.nproc_is_per_machine() is counted


def test_links_in_proc_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "device-tree").symlink_to("/sys/firmware/devicetree/base")
    (tmp_path / "kcore").write_text("")
    monkeypatch.setattr(command, "PROC", tmp_path)
    assert command._masks() == ["--ro-bind", "/dev/null", str(tmp_path / "kcore")]


class _Uname:
    def __init__(self, release: str) -> None:
        self.release = release
