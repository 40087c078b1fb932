"""A client that speaks JSON lines with a server process, so that no SDK's own clean-up gets in the way."""

import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.functional.checkout import REPO
from tests.waiting import HANG_S, promised

MAX_LINE_BYTES = 1 << 25
# A client between the test and the server: it starts the server on its own stdin and stdout, and waits.
PARENT = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")


class RawClient:
    """The client's end of the pipes."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self.process = process
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._last_id = 0

    async def send(self, method: str, params: Mapping[str, Any], **more: object) -> None:
        """Send a message, and do not wait for the answer."""
        message = {"jsonrpc": "2.0", "method": method, "params": params, **more}
        await self.send_line(json.dumps(message).encode())

    async def send_line(self, line: bytes) -> None:
        """Send bytes that may be no message, and a line break."""
        assert self.process.stdin is not None
        await self.process.stdin.send(line + b"\n")

    async def receive(self) -> dict[str, Any]:
        """Return the next message of the server."""
        message: dict[str, Any] = json.loads(await self._lines.receive_until(b"\n", MAX_LINE_BYTES))
        return message

    async def ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its result."""
        self._last_id += 1
        await self.send(method, params, id=self._last_id)
        while True:
            message = await self.receive()
            if message.get("id") == self._last_id:
                result: dict[str, Any] = message["result"]
                return result

    async def call(self, tool: str, **arguments: object) -> dict[str, Any]:
        """Call a tool and wait for its result."""
        return await self.ask("tools/call", {"name": tool, "arguments": arguments})

    async def start_call(self, tool: str, *, request_id: str = "unanswered", **arguments: object) -> None:
        """Call a tool, and do not wait for the result."""
        await self.send("tools/call", {"name": tool, "arguments": arguments}, id=request_id)

    async def start(self, sandboxes: int = 1) -> str:
        """Shake hands and create sandboxes; return the id of the last one."""
        client = {"name": "raw", "version": "0"}
        await self.ask("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client})
        await self.send("notifications/initialized", {})
        for _ in range(sandboxes):
            result = await self.call("create_sandbox")
        sandbox_id: str = result["structuredContent"]["sandbox_id"]
        return sandbox_id

    async def close_stdin(self) -> None:
        """Tell the server that no more messages come."""
        assert self.process.stdin is not None
        await self.process.stdin.aclose()

    async def exit_status(self) -> int:
        """Wait for the process to end, which takes no longer than promised."""
        with anyio.fail_after(promised()):
            return await self.process.wait()


@asynccontextmanager
async def started(argv: Sequence[str], stderr: Path, environment: Mapping[str, str]) -> AsyncIterator[RawClient]:
    """Start a server, or a program that starts one, and end it with the block. The block has a deadline."""
    with anyio.fail_after(HANG_S), stderr.open("wb") as file:
        process = await anyio.open_process(argv, cwd=REPO, env=environment, stderr=file)
        try:
            yield RawClient(process)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            with anyio.move_on_after(promised(), shield=True):
                await process.wait()
            with anyio.CancelScope(shield=True):
                await process.aclose()  # kills it, if need be
