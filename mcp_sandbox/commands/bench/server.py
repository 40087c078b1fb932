"""A server of our own, spoken to as its clients and its operators do."""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult, TextContent

from mcp_sandbox.commands.bench.subject import FIRST_CODE, MeasurementFailed
from mcp_sandbox.commands.common import SERVER, environment, run_of
from mcp_sandbox.config import Settings
from mcp_sandbox.operating.control import Request, ask
from mcp_sandbox.views import SandboxView
from mcp_sandbox.views.text import readable
from vmm.process_table import ProcessId, own_child

NO_OP = "list_sandboxes"  # a tool that touches no machine
LOOK_S = 0.02  # between two looks at a server that is busy
SETTLE_S = 300.0  # machines restore in parts of a second, emulated ones of a cold host in minutes


@dataclass(frozen=True, slots=True)
class BenchServer:
    """An MCP server on stdio that is a child of this process."""

    client: Client
    process: ProcessId
    run_dir: Path

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """The result of a tool; raises MeasurementFailed if it is an error."""
        result = await self.client.call_tool(tool, arguments)
        if result.is_error:
            raise MeasurementFailed(f"{tool} failed: {_text(result)}")
        return result

    async def timed(self, tool: str, arguments: dict[str, Any]) -> tuple[float, CallToolResult]:
        """The same, and the milliseconds it took."""
        began = anyio.current_time()
        result = await self.call(tool, arguments)
        return 1000 * (anyio.current_time() - began), result

    async def create(self) -> str:
        """A new sandbox's id."""
        return sandbox_of(await self.call("create_sandbox", {}))

    async def run(self, sandbox: str, code: str = FIRST_CODE) -> str:
        """Return the value of a run's last expression. Raises MeasurementFailed if the code failed."""
        result = await self.call("run_code", {"sandbox_id": sandbox, "code": code})
        view = run_of(result)
        if view.status != "ok":
            raise MeasurementFailed(f"A run ended with {view.status}: {_text(result)}")
        return readable(view.displays[-1]).strip() if view.displays else ""

    async def close(self, sandbox: str) -> None:
        await self.call("close_sandbox", {"sandbox_id": sandbox})

    async def settled(self, ready: int) -> None:
        """Wait until there is nothing but `ready` machines in the pool: none starts and none ends."""
        with anyio.move_on_after(SETTLE_S):
            while not is_settled(await self._stats(), ready):  # noqa: ASYNC110 - another process
                await anyio.sleep(LOOK_S)
            return
        raise MeasurementFailed(f"The server did not come to rest with {ready} machines ready within {SETTLE_S:.0f} s.")

    async def _stats(self) -> dict[str, Any]:
        request = partial(ask, self.run_dir, self.process, Request(do="stats", sandbox_id=""))
        stats: dict[str, Any] = await anyio.to_thread.run_sync(request)
        return stats


@asynccontextmanager
async def open_server(settings: Settings, changes: Mapping[str, object]) -> AsyncIterator[BenchServer]:
    """A server with these settings, some of them changed."""
    changed = settings.changed(changes)
    parameters = StdioServerParameters(command=sys.executable, args=list(SERVER), env=environment(changed))
    async with Client(parameters) as client:
        process = own_child(*SERVER)
        if process is None:
            raise MeasurementFailed("The server answers, but is not in the process table.")
        yield BenchServer(client, process, changed.run_dir)


def is_settled(stats: dict[str, Any], ready: int) -> bool:
    """Whether a server that says this has `ready` machines waiting and no others."""
    waiting = sum(pool["ready"] for pool in stats["pools"])
    alone = {"starting": 0, "running": ready, "ending": 0}
    return bool(waiting == ready and stats["machines"] == alone)


def sandbox_of(created: CallToolResult) -> str:
    """The id in the result of a tool that makes a sandbox."""
    return SandboxView.model_validate(created.structured_content).sandbox_id


def _text(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))
