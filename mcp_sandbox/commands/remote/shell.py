"""`mcp-sandbox shell`: the user's terminal, connected to one in a sandbox."""

import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import anyio
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from mcp_sandbox.commands.common import report_errors
from mcp_sandbox.commands.remote.address import Address
from mcp_sandbox.commands.remote.client import Server, refusal_of
from mcp_sandbox.commands.remote.errors import NoTerminal, ServerUnreachable
from mcp_sandbox.commands.remote.sandboxes import SANDBOXES, path_of, server_for
from mcp_sandbox.commands.remote.sockets import open_socket
from mcp_sandbox.config import Settings
from mcp_sandbox.serving.lifetime import run_command

STDIN, STDOUT = 0, 1
READ_BYTES = 16 << 10
KILLED = 128  # shells add a signal's number to it


def shell(settings: Settings, url: str | None, sandbox_id: str | None, template: str | None) -> int:
    """Open a terminal in a sandbox, or in a new one that is closed afterwards. Returns the shell's exit code."""

    def work() -> int:
        if not os.isatty(STDIN) or not os.isatty(STDOUT):
            raise NoTerminal
        server = server_for(settings, url)
        with _box(server, sandbox_id, template) as box:
            return run_command(lambda: _connected(server.address, box))

    return report_errors(work)


@contextmanager
def _box(server: Server, sandbox_id: str | None, template: str | None) -> Iterator[str]:
    if sandbox_id is not None:
        yield path_of(sandbox_id)
        return
    box = path_of(server.post(SANDBOXES, {"template": template})["sandbox_id"])
    try:
        yield box
    finally:
        server.delete(box)


async def _connected(address: Address, box: str) -> int:
    query = urlencode({**_size(), "term": os.environ.get("TERM", "xterm")})
    async with open_socket(address, f"{box}/terminal?{query}") as remote:
        with raw_mode():
            end = await _carry(remote)
    if end is None:
        raise ServerUnreachable(str(address), "it closed the connection")
    if "code" in end:
        raise refusal_of(end)
    return end["exit_code"] if end["exit_code"] is not None else KILLED + signal.Signals[end["signal"]]


async def _carry(remote: ClientConnection) -> dict[str, Any] | None:
    """Carry bytes both ways; returns the server's last message, or None if the connection was lost."""
    last: dict[str, Any] | None = None

    async def show() -> None:
        nonlocal last
        async for message in remote:
            if isinstance(message, str):
                last = json.loads(message)
            else:
                _write(message)
        tasks.cancel_scope.cancel()

    async def take() -> None:
        while data := await _typed():
            await remote.send(data)
        tasks.cancel_scope.cancel()  # the terminal is gone

    async def follow_size() -> None:
        with anyio.open_signal_receiver(signal.SIGWINCH) as changes:
            async for _ in changes:
                await remote.send(json.dumps(_size()))

    try:
        async with anyio.create_task_group() as tasks:
            for work in (show, take, follow_size):
                tasks.start_soon(work)
    except* ConnectionClosed:
        pass
    return last


async def _typed() -> bytes:
    await anyio.wait_readable(STDIN)
    try:
        return os.read(STDIN, READ_BYTES)
    except OSError:
        return b""


@contextmanager
def raw_mode() -> Iterator[None]:
    """Pass every key on, Ctrl-C as well, and restore the terminal whatever happens."""
    before = termios.tcgetattr(STDIN)
    try:
        tty.setraw(STDIN)
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSAFLUSH, before)


def _size() -> dict[str, int]:
    columns, rows = os.get_terminal_size(STDIN)
    return {"columns": columns or 80, "rows": rows or 24}  # a terminal that knows no size says 0


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
