"""Which command lines are one small program, so that the shell need not fork for it."""

from pathlib import Path

import pytest

from guest.agent.single_program import is_single_program

PATH = "/nowhere:/usr/bin:/bin"


@pytest.mark.parametrize(
    "line", ["ls", "ls -la", "  ls /tmp", "ls *.py", "ls 'a b' \"$HOME\"", "cat < /dev/null > /tmp/x", "ls # all"]
)
def test_a_small_program_with_arguments_is_one(line: str):
    assert is_single_program(line, PATH)


@pytest.mark.parametrize(
    "line",
    [
        *("", " ", "-ls", '"ls"', "l\\s", "ls\t-l", "./ls", "/bin/ls", "no-such-program"),
        *("ls; ls", "ls && ls", "ls | cat", "ls &", "ls\nls", "ls $(pwd)", "ls `pwd`", "(ls)", "A=1 ls"),
        *("ls ${X:=1}", "ls $[X=1]", "cd /", "time ls", "if ls", "exec ls"),
        *("echo hello", "kill -9 1", "python3 x.py", "setsid ls", "env ls", "bash -c ls", "timeout 1 ls"),
    ],
)
def test_anything_else_is_left_to_the_shell(line: str):
    assert not is_single_program(line, PATH)


def test_a_program_that_another_one_hides_is_left_to_the_shell(tmp_path: Path):
    program = tmp_path / "ls"
    program.write_text("#!/bin/sh\n")
    assert is_single_program("ls", f"{tmp_path}:{PATH}")  # it is not executable yet
    program.chmod(0o755)
    assert not is_single_program("ls", f"{tmp_path}:{PATH}")
    assert not is_single_program("ls", "")


def test_no_line_is_recognized_if_every_shell_begins_with_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BASH_ENV", "/etc/functions")
    assert not is_single_program("ls", PATH)
