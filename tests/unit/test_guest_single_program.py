"""Which command lines are one program, so that the shell need not fork for it."""

from pathlib import Path

import pytest

from guest.agent.single_program import is_single_program

PATH = "/nowhere:/usr/bin:/bin"


@pytest.mark.parametrize(
    "line",
    ["ls", "ls -la", "  ls /tmp", "ls *.py", "ls 'a b' \"$HOME\"", "cat < /dev/null > /tmp/x", "/bin/ls", "ls # all"],
)
def test_a_program_with_arguments_is_one(line: str):
    assert is_single_program(line, "/", PATH)


@pytest.mark.parametrize(
    "line",
    [
        "",
        " ",
        "ls; ls",
        "ls && ls",
        "ls | cat",
        "ls &",
        "ls\nls",
        "ls $(pwd)",
        "ls `pwd`",
        "(ls)",
        "A=1 ls",
        "cd /",
        "time ls",
        "test -e /",
        "echo hello",
        "kill -9 1",
        "if ls",
        "-ls",
        '"ls"',
        "l\\s",
        "$SHELL -c ls",
        "no-such-program",
        "/etc/passwd",
        "/usr",
    ],
)
def test_anything_else_is_left_to_the_shell(line: str):
    assert not is_single_program(line, "/", PATH)


def test_a_program_is_found_from_the_directory_of_the_command(tmp_path: Path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    assert not is_single_program("./program", str(tmp_path), PATH)  # nobody may execute it yet
    program.chmod(0o755)
    assert is_single_program("./program", str(tmp_path), PATH)
    assert not is_single_program("./program", "/", PATH)


def test_directories_of_the_path_that_depend_on_the_current_one_do_not_count(tmp_path: Path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert is_single_program("program", "/", f"{PATH}:{tmp_path}")
    assert not is_single_program("program", str(tmp_path), f"{PATH}:.:")
