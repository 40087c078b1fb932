"""The agent's parts, without a machine."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
GUEST = REPO / "guest"

# The kernel changes the whole process it lives in, so it gets one.
REHEARSE = """
import os, socket
from guest.kernels.python import Kernel
kernel = Kernel()
kernel.pid = os.getpid()
agent, control = socket.socketpair()
obey = kernel._obey
def obey_once(frame):
    obey(frame)
    assert kernel.shell.user_ns["_"] == 2
    agent.send(b"the first caller")
kernel._obey = obey_once
kernel._rehearse(control)
print(sorted(name for name in kernel.shell.user_ns if name == "_"))
"""


def test_a_kernel_does_not_import_the_agent_that_starts_it():
    assert not [file.name for file in (GUEST / "kernels").glob("*.py") if "guest.agent" in file.read_text()]


def test_a_rehearsal_leaves_nothing_for_the_first_caller(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPO), "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "-B", "-c", REHEARSE]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("[]\n", 0), ended.stderr
