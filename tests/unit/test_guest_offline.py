"""What stands before programs that install packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from guest.agent.offline import INSTALLERS, LIBRARY, TOOLS, script

ADVICE = "pip: this sandbox is offline"
REAL = """#!/bin/sh
echo "real $*"
case "$*" in *bad*) exit 5 ;; esac
"""


@pytest.fixture
def real(tmp_path: Path) -> Path:
    path = tmp_path / "it's real"
    path.write_text(REAL)
    path.chmod(0o755)
    return path


def call(real: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    shim = script("pip", real, *INSTALLERS["pip"])
    return subprocess.run(["sh", "-c", shim, "pip", *arguments], capture_output=True, text=True, check=False)


def test_what_installs_nothing_is_the_programs_own_affair(real: Path):
    done = call(str(real), "list", "bad thing")
    assert (done.returncode, done.stdout, done.stderr) == (5, "real list bad thing\n", "")


def test_an_install_that_works_is_left_alone(real: Path):
    done = call(str(real), "--quiet", "install", "./good.whl")
    assert (done.returncode, done.stdout, done.stderr) == (0, "real --quiet install ./good.whl\n", "")


def test_an_install_that_fails_is_followed_by_advice_and_keeps_its_exit_code(real: Path):
    done = call(str(real), "install", "bad")
    assert (done.returncode, done.stdout) == (5, "real install bad\n")
    assert done.stderr.startswith(ADVICE)
    assert "wheels in a template.toml" in done.stderr


@pytest.mark.parametrize("arguments", [("install", "x"), ("list",), ()])
def test_a_program_that_is_not_there_is_answered_for(arguments: tuple[str, ...]):
    done = call("", *arguments)
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith(ADVICE)


@pytest.mark.parametrize("name", sorted({**INSTALLERS, **TOOLS}))
def test_every_shim_is_a_script_that_shells_can_read(name: str):
    text = script(name, "/usr/bin/it", *{**INSTALLERS, **TOOLS}[name])
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def python(*arguments: str, path: str = LIBRARY) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "PIP_NO_INDEX": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_pip_of_an_interpreter_has_its_say_before_the_advice():
    done = python("-m", "pip", "install", "no-such-package-anywhere")
    assert done.returncode == 1
    assert "No matching distribution" in done.stderr
    assert ADVICE in done.stderr.splitlines()[-1]
    assert python("-m", "pip", "--version").stdout.startswith("pip ")


def test_an_interpreter_without_pip_gives_the_advice():
    done = python("-S", "-m", "pip", "install", "anything")  # without its site packages
    assert done.returncode == 1
    assert done.stderr.startswith(ADVICE)


def test_whoever_imports_pip_gets_the_real_one_or_none():
    assert "guest/offline" not in python("-c", "import pip; print(pip.__file__); import pip._internal").stdout
    done = python("-S", "-c", "import pip")
    assert "ModuleNotFoundError: No module named 'pip'" in done.stderr
