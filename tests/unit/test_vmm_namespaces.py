"""A process in namespaces of its own sees nothing of the host but what it is given."""

import os
from collections.abc import Sequence
from pathlib import Path

import anyio

from vmm import namespaces
from vmm.memory import sealed_bytes
from vmm.namespaces import in_namespaces
from vmm.probe import own_user
from vmm.process import Confinement, spawn


async def output(argv: list[str], pass_fds: Sequence[int] = ()) -> str:
    with anyio.fail_after(30):
        async with spawn(argv, confinement=Confinement(own_user(), offline=False), pass_fds=pass_fds) as process:
            end = await process.wait()
    assert end.code == 0, end
    return end.detail


async def test_its_root_has_nothing_but_programs_devices_and_its_own_processes():
    script = "pwd; ls -A /; ls /dev; ls -A /old /tmp; ls /proc | grep -x '[0-9]*'; ls -A /proc/1/cwd"
    root = {
        path.split("/")[1] for path in (*namespaces.PROGRAMS, "/dev", "/old", "/proc", "/tmp") if Path(path).exists()
    }
    seen = (await output(in_namespaces(["sh", "-c", script], programs=True))).split()
    assert seen[0] == "/"
    assert set(seen) >= {*root - {"old"}, "null", "urandom"}
    assert not {"root", "home", "var", "sys", "boot", "srv", "passwd"} & set(seen)
    assert len([word for word in seen if word.isdigit()]) <= 3, "processes besides the script's own"


async def test_a_program_has_the_real_path_that_it_has_on_the_host():
    """QEMU finds its files from there."""
    for path in ("/bin/sh", "/usr/bin/env"):
        argv = in_namespaces(["sh", "-c", f"readlink -f {path}"], programs=True)
        assert await output(argv) == str(Path(path).resolve())


async def test_it_finds_the_files_and_directories_that_it_is_given():
    note = sealed_bytes(b"for you")
    try:
        argv = in_namespaces(
            ["sh", "-c", "cat /run/a/note; ls -A /run/b"],
            programs=True,
            folders=["/run/b"],
            files={"/run/a/note": note},
        )
        assert await output(argv, [note]) == "for you"
    finally:
        os.close(note)


async def test_its_mounts_are_not_the_hosts():
    before = Path("/proc/self/mountinfo").read_text()
    mounted = await output(in_namespaces(["cat", "/proc/self/mountinfo"], programs=True))
    assert Path("/proc/self/mountinfo").read_text() == before
    assert {line.split()[4].split("/")[1] for line in mounted.splitlines()} <= {
        *("", "proc", "dev"),
        *(path.split("/")[1] for path in namespaces.PROGRAMS),
    }
