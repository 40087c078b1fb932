"""How the shell of a command is started, by a process that has the descriptors of this test only."""

import subprocess
import sys
from pathlib import Path

import pytest

from guest.agent.shell_session import RECORD_FD

START = """
import os, sys
from guest.agent.command import Start, start_shell
from guest.agent.user import User

directory = os.open(sys.argv[1], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
os.dup2(directory, int(sys.argv[2]), inheritable=False)
record = os.memfd_create("session")
line = "pwd; echo of the session >&9"
start = Start(["/bin/sh", "-c", line], os.environ, int(sys.argv[2]), 0, [1, 2], record)
status = os.waitpid(start_shell(start, User(None, None)), 0)[1]
print(os.pread(record, 100, 0), status, flush=True)
"""


@pytest.mark.parametrize("number", [RECORD_FD, RECORD_FD + 20])
def test_a_shell_starts_in_its_directory_whatever_descriptor_that_has(number: int, tmp_path: Path):
    command = [sys.executable, "-c", START, str(tmp_path), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{tmp_path}\nb'of the session\\n' 0\n", "")
