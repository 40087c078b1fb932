"""`mcp-sandbox run -i` on a server: what is typed goes to the code, and its output is shown as it comes."""

import os
import sys
import threading
from contextlib import suppress

from mcp_sandbox.commands.interactive import READ_BYTES, STDIN
from mcp_sandbox.commands.remote.client import Server
from mcp_sandbox.commands.remote.errors import RequestRefused
from mcp_sandbox.commands.remote.logs import follow_run


def carry(server: Server, run: str) -> None:
    """Send what is typed to the run at a path, and print its output until it ends."""
    threading.Thread(target=_forward, args=(server, run), daemon=True).start()  # it may wait for a key forever
    follow_run(server, f"{run}/events")


def _forward(server: Server, run: str) -> None:
    try:
        while data := os.read(STDIN, READ_BYTES):
            while data:
                try:
                    server.send(f"{run}/stdin", data)
                    break
                except RequestRefused as refused:
                    if refused.problem != "stdin_full":
                        raise
                    data = data[refused.taken :]
        server.send(f"{run}/stdin", b"", close="true")
    except RequestRefused as refused:
        if refused.problem not in ("stdin_closed", "run_not_found", "sandbox_closed"):  # else the code has ended
            with suppress(ValueError):  # this process is ending
                sys.stderr.write(f"mcp-sandbox: the rest of the input was not sent: {refused}\n")
