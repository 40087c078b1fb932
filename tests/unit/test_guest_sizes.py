"""What the agent and the kernel do when a machine gets another size than its snapshot's. No machine is started."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from guest.agent import processors
from guest.agent.processors import Processors
from guest.agent.user import RESERVED_MB, User

MIB = 1024 * 1024
IN_CHILD = """
import resource, sys
from guest.processes import set_soft_limits
kind = resource.RLIMIT_RSS
resource.setrlimit(kind, (1 << 20, 1 << 30))
set_soft_limits({kind: 2 << 20})
print(resource.getrlimit(kind))
set_soft_limits({kind: 2 << 40})
print(resource.getrlimit(kind))
"""
BLAS_THREADS = """
import numpy, os, sys
from guest.kernels.threads import use_cpus
def threads(): return len(os.listdir("/proc/self/task"))
before = threads()
use_cpus(4)
square = numpy.ones((500, 500))
square @ square
print(threads() - before)
"""


def test_only_a_python_kernel_has_a_limit_on_addresses_and_it_is_far_above_its_memory():
    user = User(1000, 1000, memory_mb=512)
    assert resource.RLIMIT_AS not in user.soft_limits()
    assert resource.RLIMIT_DATA not in user.soft_limits(addresses=True)
    assert user.soft_limits(addresses=True)[resource.RLIMIT_AS] == (512 + RESERVED_MB) * MIB
    user.memory_mb = 4096
    assert user.soft_limits(addresses=True)[resource.RLIMIT_AS] == (4096 + RESERVED_MB) * MIB


def test_soft_limits_change_within_the_hard_ones():
    done = subprocess.run([sys.executable, "-c", IN_CHILD], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str((2 << 20, 1 << 30)), str((1 << 30, 1 << 30))]


def test_code_sees_the_cpus_of_its_machine_and_later_those_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    info = tmp_path / "cpuinfo"
    info.write_text("".join(f"processor\t: {number}\nmodel\t: m\n\n" for number in range(4)))
    covered: list[str] = []
    set_for: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(processors, "INFO", str(info))
    monkeypatch.setattr(processors, "PLACE", str(tmp_path / "cpu"))
    monkeypatch.setattr(processors, "_cover", lambda path, _source: covered.append(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: set_for.append((pid, cpus)))

    shown = Processors(1)
    assert covered == [f"{processors.SYSTEM}/{name}" for name in ("online", "possible", "present")] + [str(info)]
    assert (tmp_path / "cpu/online").read_text() == "0\n"
    assert (tmp_path / "cpu/cpuinfo").read_text() == "processor\t: 0\nmodel\t: m\n\n"
    assert set_for == [(0, [0])]

    shown.show(3)
    assert (tmp_path / "cpu/online").read_text() == "0-2\n"
    assert (tmp_path / "cpu/cpuinfo").read_text().count("processor") == 3
    assert (os.getpid(), [0, 1, 2]) in set_for


def test_linear_algebra_that_was_loaded_with_one_cpu_uses_more():
    pytest.importorskip("numpy")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BLAS_THREADS], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "3"
