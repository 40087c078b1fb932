"""The scripts and the module in front of programs that install packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from guest.agent.offline import INSTALLERS, LIBRARY, TOOLS, script
from guest.offline.pip import NETWORK

ADVICE = "pip: this sandbox is offline"
REAL = """#!/bin/sh
echo "real $*${PIP_NO_INDEX:+ offline}"
case "$*" in *bad*) exit 5 ;; esac
"""


@pytest.fixture
def real(tmp_path: Path) -> Path:
    path = tmp_path / "it's real"
    path.write_text(REAL)
    path.chmod(0o755)
    return path


def call(real: str, *arguments: str, network: Path = Path("/nonexistent")) -> subprocess.CompletedProcess[str]:
    shim = script("pip", real, *INSTALLERS["pip"]).replace(NETWORK, str(network))
    return subprocess.run(["sh", "-c", shim, "pip", *arguments], capture_output=True, text=True, check=False)


def test_a_command_that_installs_nothing_is_passed_on(real: Path):
    done = call(str(real), "list", "bad thing")
    assert (done.returncode, done.stdout, done.stderr) == (5, "real list bad thing offline\n", "")


def test_an_install_that_works_is_left_alone(real: Path):
    done = call(str(real), "--quiet", "install", "./good.whl")
    assert (done.returncode, done.stdout, done.stderr) == (0, "real --quiet install ./good.whl offline\n", "")


def test_an_install_that_fails_is_followed_by_advice_and_keeps_its_exit_code(real: Path):
    done = call(str(real), "install", "bad")
    assert (done.returncode, done.stdout) == (5, "real install bad offline\n")
    assert done.stderr.startswith(ADVICE)
    assert "wheels in its template.toml" in done.stderr


def test_with_a_network_the_program_is_left_alone(real: Path, tmp_path: Path):
    (tmp_path / "network").touch()
    done = call(str(real), "install", "bad", network=tmp_path / "network")
    assert (done.returncode, done.stdout, done.stderr) == (5, "real install bad\n", "")


@pytest.mark.parametrize("arguments", [("install", "x"), ("list",), ()])
def test_a_missing_program_prints_advice(arguments: tuple[str, ...]):
    done = call("", *arguments)
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith(ADVICE)


@pytest.mark.parametrize("name", sorted({**INSTALLERS, **TOOLS}))
def test_every_shim_is_a_script_that_shells_can_read(name: str):
    text = script(name, "/usr/bin/it", *{**INSTALLERS, **TOOLS}[name])
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def python(*arguments: str, path: str = LIBRARY) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_python_m_pip_runs_the_real_pip_before_the_advice():
    done = python("-m", "pip", "install", "no-such-package-anywhere")
    assert done.returncode == 1
    assert "No matching distribution" in done.stderr
    assert ADVICE in done.stderr.splitlines()[-1]
    assert python("-m", "pip", "--version").stdout.startswith("pip ")


def test_python_m_pip_without_a_pip_prints_the_advice():
    done = python("-S", "-m", "pip", "install", "anything")  # without its site packages
    assert done.returncode == 1
    assert done.stderr.startswith(ADVICE)


def test_import_pip_gets_the_real_pip_or_none():
    assert "guest/offline" not in python("-c", "import pip; print(pip.__file__); import pip._internal").stdout
    done = python("-S", "-c", "import pip")
    assert "ModuleNotFoundError: No module named 'pip'" in done.stderr


def test_with_a_network_a_missing_program_does_not_say_offline(tmp_path: Path):
    (tmp_path / "network").touch()
    done = call("", "install", "x", network=tmp_path / "network")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "pip: this sandbox's template does not contain it\n"
