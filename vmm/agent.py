"""How the agent starts in machines that boot no kernel: it reads its code from standard input.

So the root file system contains nothing of ours, and no directory of the host is shared with the machine.
"""

from pathlib import Path

from anyio.abc import ByteSendStream

from vmm.trust import read_trusted

PYTHON = "/usr/lib/mcp-sandbox/python3"  # every image has it: an interpreter of ours, or a link to the image's
PLACE = "/run/mcp-sandbox"
LENGTH_BYTES = 4

# The machine's first program. It replaces itself with the agent, so none of it stays in memory.
_START = f"""
import io, os, sys, tarfile
def take(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit("the host sent no agent")
    return data
archive = take(int.from_bytes(take({LENGTH_BYTES}), "big"))
tarfile.open(fileobj=io.BytesIO(archive)).extractall("{PLACE}")
os.execv(sys.executable, [sys.executable, "-B", "-m", "guest.agent", "--stdio", *sys.argv[1:]])
"""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": PLACE,
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}


def agent_argv(*options: str) -> list[str]:
    """Return the command that starts the agent with `options`."""
    return [PYTHON, "-c", _START, *options]


async def send_code(stream: ByteSendStream, archive: Path) -> None:
    """Send the agent's code to a machine that has just started."""
    code = read_trusted(archive)
    await stream.send(len(code).to_bytes(LENGTH_BYTES, "big") + code)
