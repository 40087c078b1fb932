"""How the agent starts in machines that boot no kernel: its code comes in on standard input, then the channel begins.

Nothing of ours lies in the machine's root file system, and no directory of the host has to be shared with it.
"""

from pathlib import Path

from anyio.abc import ByteSendStream

PYTHON = "/usr/lib/mcp-sandbox/python3"  # in every image: a Python of its own, or a link to the image's
PLACE = "/run/mcp-sandbox"
LENGTH_BYTES = 4

# The first program of the machine. It becomes the agent, so that nothing of it stays in memory.
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
    """The command that starts the agent in a machine, with options of the agent's own."""
    return [PYTHON, "-c", _START, *options]


async def send_code(stream: ByteSendStream, archive: Path) -> None:
    """Give a machine that has just started its agent."""
    code = archive.read_bytes()
    await stream.send(len(code).to_bytes(LENGTH_BYTES, "big") + code)
