"""`mcp-sandbox demo` with real machines."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import BUILD_S

PNG = b"\x89PNG\r\n\x1a\n"


def call(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "mcp_sandbox", *arguments]
    env = {**os.environ, "COLUMNS": "120", **environment}
    return subprocess.run(argv, cwd=directory, env=env, capture_output=True, text=True, timeout=BUILD_S)


@pytest.mark.vm
def test_the_tour_runs_saves_its_chart_and_leaves_no_machine(tmp_path: Path):
    done = call(tmp_path, "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 machines left" in done.stdout
    assert (tmp_path / "demo-output" / "chart.png").read_bytes().startswith(PNG)
    pids = re.findall(r"machines are processes ([\d, ]+)", done.stdout)
    assert pids
    assert not any(psutil.pid_exists(int(number)) for number in pids[0].split(","))

    examined = call(tmp_path, "doctor", "--json")
    report = json.loads(examined.stdout)
    assert examined.returncode == 0
    assert report["ready"]
    template = next(template for template in report["templates"] if template["default"])
    assert template["built"]
    assert 0 < template["snapshot_bytes"] <= template["memory_mb"] * 1024 * 1024 * 1.5  # memory and disk, without holes


def test_a_host_that_lacks_programs_ends_the_demo_with_a_clear_message(tmp_path: Path):
    done = call(tmp_path, "--home", str(tmp_path / "home"), "demo", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "is not installed" in done.stderr
    assert "Traceback" not in done.stderr
