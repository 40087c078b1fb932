"""What every process of a machine has of the host, wrappers and helpers included, in case one of them is taken over."""

import os
import stat
from pathlib import Path

import pytest

from tests.functional.machines import Clone, Machines, only
from vmm.process_table import with_descendants

pytestmark = [pytest.mark.vm, pytest.mark.rights]

# bubblewrap waits outside of the namespaces that it makes.
EMPTY_ROOT = only("firecracker", "cloud-hypervisor", "qemu", "gvisor")


def names_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")[:80]


def descriptors_of(pid: int) -> list[Path]:
    """The open files of a process; none if only root may see them, as those of a bubblewrap machine's agent."""
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        assert os.geteuid() != 0
        return []


def test_no_process_has_our_working_directory(machines: Machines, shared: Clone):
    ours = (Path.cwd(), machines.host.settings.home)
    for pid in with_descendants(shared.pid):
        there = Path(f"/proc/{pid}/cwd")
        assert not any(there.samefile(path) for path in ours), names_of(pid)


def test_the_processes_outside_of_the_machine_are_in_the_root_directory(shared: Clone):
    assert str(Path(f"/proc/{shared.pid}/cwd").readlink()) == "/"


def test_no_process_has_a_directory_of_the_host_open(machines: Machines, shared: Clone):
    """From a directory one gets to all others, whatever the root directory is."""
    host = {path.stat().st_dev for path in (Path("/"), machines.host.settings.home)}
    opened = [
        (names_of(pid), link.readlink())
        for pid in with_descendants(shared.pid)
        for link in descriptors_of(pid)
        if stat.S_ISDIR(link.stat().st_mode) and link.stat().st_dev in host
    ]
    assert opened == []


@EMPTY_ROOT
def test_no_process_sees_the_hosts_files(machines: Machines, shared: Clone):
    private = ("/root", "/home", "/var", "/srv", "/boot", "/sys", "/etc/passwd", str(machines.host.settings.home))
    for pid in with_descendants(shared.pid):
        seen = [path for path in private if Path(f"/proc/{pid}/root{path}").exists()]
        assert seen == [], names_of(pid)
        assert Path(f"/proc/{pid}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()


@EMPTY_ROOT
def test_no_process_can_add_anything_to_what_it_sees_of_the_host(shared: Clone):
    """What is left of the host are programs, devices and processes, none of which belongs to the machine's user."""
    if os.geteuid() != 0:
        pytest.skip("programs may belong to this user")
    for pid in with_descendants(shared.pid):
        uid = Path(f"/proc/{pid}").stat().st_uid
        for place in ("usr", "bin", "lib"):
            found = Path(f"/proc/{pid}/root/{place}")
            if found.exists() and any(found.iterdir()):
                assert found.stat().st_uid != uid
                assert not found.stat().st_mode & stat.S_IWOTH


@EMPTY_ROOT
def test_its_first_process_ends_all_others(shared: Clone):
    """Every process but the one that waits outside is in the machine's own pid namespace."""
    waiting, *inside = with_descendants(shared.pid)
    assert inside
    ours = Path("/proc/self/ns/pid").readlink()
    assert Path(f"/proc/{waiting}/ns/pid").readlink() == ours
    assert all(Path(f"/proc/{pid}/ns/pid").readlink() != ours for pid in inside)
