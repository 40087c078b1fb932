"""The command line, where it needs no machine."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcp_sandbox.cli import app


def test_the_command_line_imports_nothing_heavy_before_a_command_runs():
    heavy = {"mcp", "pydantic", "anyio", "vmm", "guest.client"}
    code = f"import sys, mcp_sandbox.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, "0.1.0\n")


def test_an_unknown_setting_is_named_and_the_exit_code_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mcp-sandbox.toml").write_text("colour = 3\n")
    result = CliRunner().invoke(app, ["template", "list"])
    assert result.exit_code == 2
    assert "unknown setting 'colour'" in result.stderr


def test_an_unknown_driver_is_named(tmp_path: Path):
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "--driver", "nonsense"])
    assert result.exit_code == 1
    assert "nonsense" in result.stderr


def test_an_unknown_template_cannot_be_shown(tmp_path: Path):
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "template", "show", "nonsense"])
    assert result.exit_code == 1


COMMANDS: tuple[list[str], ...] = (
    ["run", "-"],
    ["bench", "--quick"],
    ["template", "list"],
    ["setup"],
    ["setup", "--check"],
    [],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_names_a_missing_guest_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
):
    monkeypatch.setenv("MCP_SANDBOX_GUEST_KERNEL", "/nonexistent")
    monkeypatch.setattr("mcp_sandbox.commands.setup.is_met", lambda _need: True)
    monkeypatch.setattr("mcp_sandbox.commands.setup._user_without_ids", lambda: None)
    result = CliRunner().invoke(app, ["--home", str(tmp_path), *command], input="1")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "/nonexistent" in result.stderr


def test_an_unknown_driver_is_refused_with_the_names_of_the_known_ones(tmp_path: Path):
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "--driver", "fake", "run", "-"], input="1")
    assert result.exit_code == 1
    assert (
        "there is no driver called 'fake'; choose one of: firecracker, cloud-hypervisor, qemu, gvisor, bubblewrap"
        in result.stderr
    )


@pytest.mark.parametrize("command", [["run", "-"], ["setup"], ["template", "build"], []], ids=" ".join)
def test_a_driver_that_is_too_weak_is_refused_and_both_settings_are_named(tmp_path: Path, command: list[str]):
    flags = ["--home", str(tmp_path), "--driver", "bubblewrap", "--min-isolation", "kernel"]
    result = CliRunner().invoke(app, [*flags, *command], input="1")
    assert result.exit_code == 1
    assert "Driver bubblewrap" in result.stderr
    assert "min_isolation = kernel" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["run", "-"], ["bench", "--quick"], ["template", "build"]], ids=" ".join)
def test_every_command_names_an_unknown_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]):
    monkeypatch.setenv("MCP_SANDBOX_TEMPLATE", "cobol")
    result = CliRunner().invoke(app, ["--home", str(tmp_path), *command], input="1")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "cobol" in result.stderr


def test_a_home_that_cannot_be_created_is_an_error_without_traceback(tmp_path: Path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["--home", str(tmp_path / "file" / "home"), "template", "build"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("arguments", [["binary"], ["code.py", "--stdin", "binary"]], ids=["code", "stdin"])
def test_a_binary_file_is_named_and_not_run(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xe9\xff\0")
    Path("code.py").write_text("1")
    result = CliRunner().invoke(app, ["--home", str(tmp_path), "run", *arguments])
    assert result.exit_code == 2
    assert "binary is not UTF-8 text." in result.stderr
