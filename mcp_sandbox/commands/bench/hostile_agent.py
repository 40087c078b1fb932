"""An agent that belongs to the attacker: it executes the code of runs itself, and has the channel to the host.

Code cannot become the agent of its machine. The host assumes all the same that it has.
"""

import io
import tarfile
from pathlib import Path

from templates.guest_code import pack_agent

# The honest agent but for two requests. What a run executes finds the channel in `raw` and `send`.
HOSTILE_MAIN = """
import os
from functools import partial

from guest.agent.requests import Agent
from guest.agent.user import User
from guest.protocol import encode

pipes = os.dup(0), os.dup(1)

def raw(data):
    view = memoryview(data)
    while view:
        view = view[os.write(pipes[1], view):]

def send(request, header, body=b""):
    raw(encode({"id": request, **header}, body))

def run(header, body):
    os.set_blocking(pipes[1], True)
    names = {"agent": agent, "encode": encode, "raw": raw, "send": partial(send, header["id"]), "id": header["id"]}
    exec(body.decode(), names)
    os.set_blocking(pipes[1], False)

agent = Agent(User(None, None))
agent._operations["warm"] = lambda header, body: agent._answer(header["id"], {})
agent._operations["run"] = run
agent.serve_pipes(pipes)
"""

# Ends a run.
DONE = """send({"ok": True, "status": "ok", "state": "kept", "exit_code": 0, "output":
    {"stdout_bytes": 0, "stderr_bytes": 0, "spill_complete": True, "displays_dropped": 0}})
"""


def pack_hostile_agent(archive: Path, *, first: str = "") -> None:
    """Write the archive of an agent that executes the code of runs itself, and some code before it greets its host."""
    main = HOSTILE_MAIN.replace("agent = ", f"{first}\nagent = ", 1).encode()
    packed = io.BytesIO(pack_agent())
    with tarfile.open(fileobj=packed, mode="a") as tar:
        file = tarfile.TarInfo("guest/agent/__main__.py")  # the last file of this name counts
        file.size, file.mode = len(main), 0o644
        tar.addfile(file, io.BytesIO(main))
    archive.write_bytes(packed.getvalue())
