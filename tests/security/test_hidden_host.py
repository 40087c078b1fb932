"""What code in a sandbox learns about its host: none of its names, files, processes and secrets."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.machines import Clone, Machines

pytestmark = pytest.mark.vm

REPO = Path(__file__).parents[2]
SECRET = "secret-of-the-server-4711"

# Everything a process may read of another one, of all processes in sight.
PROCESSES = """
import os
told = ""
for name in filter(str.isdigit, os.listdir("/proc")):
    for file in ("cmdline", "environ", "comm"):
        try:
            with open(f"/proc/{name}/{file}", "rb") as about: told += about.read().decode(errors="replace") + "\\n"
        except OSError:
            pass
print(told)
"""


@pytest.fixture(autouse=True, scope="module")
def secret() -> Iterator[None]:
    """Put a secret into our environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_API_KEY", SECRET)
        yield


async def test_code_sees_no_process_of_the_host(shared: Clone):
    argv = [sys.executable, "-c", "input()", SECRET]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as bystander:
        told = (await shared.run(PROCESSES)).stdout.head
        bystander.communicate()
    assert "guest.agent" in told
    assert SECRET not in told
    assert "pytest" not in told


async def test_code_gets_nothing_of_the_servers_environment(shared: Clone):
    told = (await shared.run("import os, subprocess\nprint(dict(os.environ))\n_ = subprocess.run(['env'])")).out
    assert "PATH" in told
    assert SECRET not in told


async def test_code_finds_no_file_of_the_host(machines: Machines, shared: Clone, tmp_path: Path):
    (tmp_path / "mark").touch()
    paths = [tmp_path / "mark", REPO / "vmm", machines.host.settings.home, machines.built.root, Path(sys.prefix)]
    assert all(path.exists() for path in paths)
    ran = await shared.run(f"import os\nprint([path for path in {list(map(str, paths))} if os.path.exists(path)])")
    assert ran.out == "[]"


async def test_code_does_not_learn_the_hosts_names(shared: Clone):
    ran = await shared.run(
        "import glob, platform, socket\n"
        "told = [socket.gethostname(), *platform.uname()]\n"
        "places = ['/etc/hostname', '/etc/machine-id', '/etc/hosts', '/proc/sys/kernel/hostname', '/proc/cmdline',\n"
        "    '/proc/self/cgroup', *glob.glob('/sys/class/dmi/id/*'), *glob.glob('/sys/devices/virtual/dmi/id/*')]\n"
        "for path in places:\n"
        "    try:\n        told.append(open(path).read())\n    except OSError:\n        pass\n"
        "print(told)"
    )
    names = [socket.gethostname(), *(_text(f"/etc/{name}") for name in ("machine-id", "hostname"))]
    assert shared.machine.id in ran.out
    assert set(names) & set(re.findall(r"[\w.-]+", ran.out)) == set()
    command_line = _text("/proc/cmdline")
    assert not command_line or command_line not in ran.out


def _text(path: str) -> str:
    return Path(path).read_text().strip() if os.access(path, os.R_OK) else ""
