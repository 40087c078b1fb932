"""`mcp-sandbox doctor` and `setup` as processes, as people and scripts call them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_S


def call(home: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", **({"PATH": path} if path is not None else {})}
    argv = [sys.executable, "-m", "mcp_sandbox", "--home", str(home), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=HANG_S)


def test_on_a_home_where_nothing_is_built_the_doctor_says_what_to_do_next(tmp_path: Path):
    done = call(tmp_path, "--accel", "tcg", "doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert not report["ready"]
    assert report["next_step"] in ("mcp-sandbox template build python-data-analysis", "mcp-sandbox setup")
    assert report["home"]["path"] == str(tmp_path)


def test_without_qemu_the_doctor_names_it_and_how_to_get_it(tmp_path: Path):
    done = call(tmp_path, "--driver", "qemu", "doctor", "--json", path=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert "qemu-system-x86_64" in report["verdict"]
    assert report["next_step"] == "mcp-sandbox setup"
    assert "qemu-system-x86" in {need["package"] for need in report["missing"]}


def test_the_text_report_names_a_missing_qemu_too(tmp_path: Path):
    done = call(tmp_path, "--driver", "qemu", "doctor", path=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.startswith("✗ Not ready: qemu-system-x86_64")
    assert "Next step: mcp-sandbox setup" in done.stdout


def test_setup_only_reports_when_asked_to(tmp_path: Path):
    done = call(tmp_path, "setup", "--driver", "qemu", "--check", path=str(tmp_path))
    assert done.returncode == 1
    assert "qemu-system-x86_64" in done.stdout
    assert list(tmp_path.iterdir()) == []
