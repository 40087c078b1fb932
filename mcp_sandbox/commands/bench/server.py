"""The MCP server under test: a child process on stdio, watched through its control socket."""

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult

from mcp_sandbox.commands.bench.subject import FIRST_CODE, MeasurementFailed, Subject
from mcp_sandbox.commands.common import SERVER_ARGS, environment, run_of, text_of
from mcp_sandbox.config import Settings
from mcp_sandbox.operating.control import Request, ask
from mcp_sandbox.views import SandboxView
from mcp_sandbox.views.text import readable
from vmm.process_table import ProcessId, own_child

NO_OP = "list_sandboxes"  # a tool that uses no machine
POLL_S = 0.02
IDLE_TIMEOUT_S = 300.0  # an emulated machine on a cold host takes minutes to restore
POOL_IDLE_S = 24 * 3600.0  # longer than any benchmark: the pool must not shrink meanwhile

Stats = dict[str, Any]  # what a server says about itself on its control socket


@dataclass(frozen=True, slots=True)
class BenchServer:
    """An MCP server on stdio that is a child of this process."""

    client: Client
    process: ProcessId
    settings: Settings

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool. Raises MeasurementFailed if it returns an error."""
        result = await self.client.call_tool(tool, arguments)
        if result.is_error:
            raise MeasurementFailed(f"{tool} failed: {text_of(result)}")
        return result

    async def time_call(self, tool: str, arguments: dict[str, Any]) -> tuple[float, CallToolResult]:
        """Call a tool and return the milliseconds it took and its result."""
        began = anyio.current_time()
        result = await self.call(tool, arguments)
        return 1000 * (anyio.current_time() - began), result

    async def create(self) -> str:
        """Create a sandbox and return its id."""
        return sandbox_of(await self.call("create_sandbox", {}))

    async def run(self, sandbox: str, code: str = FIRST_CODE) -> str:
        """Return the value of a run's last expression. Raises MeasurementFailed if the code failed."""
        result = await self.call("run_code", {"sandbox_id": sandbox, "code": code})
        view = run_of(result)
        if view.status != "ok":
            raise MeasurementFailed(f"A run ended with {view.status}: {text_of(result)}")
        return readable(view.displays[-1]).strip() if view.displays else ""

    async def close(self, sandbox: str) -> None:
        await self.call("close_sandbox", {"sandbox_id": sandbox})

    async def burst(self, count: int) -> float:
        """Create sandboxes at the same time and close them all. Return the milliseconds that the slowest one took."""
        times: list[float] = []

        async with AsyncExitStack() as stack:

            async def create() -> None:
                took_ms, created = await self.time_call("create_sandbox", {})
                times.append(took_ms)
                stack.push_async_callback(self.close, sandbox_of(created))

            async with anyio.create_task_group() as tasks:
                for _ in range(count):
                    tasks.start_soon(create)
        return max(times)

    async def fill_pool(self, ready: int) -> None:
        """Make the pool of a server with `pool_of` settings keep `ready` machines, by requesting as many at once."""
        await self._wait_until("know the template", lambda stats: self.settings.template in _pools(stats))
        await self.burst(ready)
        await self.wait_idle(ready)

    async def wait_idle(self, ready: int) -> None:
        """Wait until the server has `ready` machines in its pool, and none that is starting, in use or ending."""
        await self._wait_until(f"become idle with {ready} machines ready", lambda stats: is_idle(stats, ready))

    async def _wait_until(self, goal: str, reached: Callable[[Stats], bool]) -> None:
        with anyio.move_on_after(IDLE_TIMEOUT_S):
            while not reached(await self._stats()):  # noqa: ASYNC110 - another process
                await anyio.sleep(POLL_S)
            return
        raise MeasurementFailed(f"The server did not {goal} within {IDLE_TIMEOUT_S:.0f} s.")

    async def _stats(self) -> Stats:
        request = partial(ask, self.settings.run_dir, self.process, Request(do="stats"))
        stats: Stats = await anyio.to_thread.run_sync(request)
        return stats


@asynccontextmanager
async def open_server(settings: Settings, changes: Mapping[str, object]) -> AsyncIterator[BenchServer]:
    """Start a server with these settings and changes to them."""
    changed = settings.changed(changes)
    parameters = StdioServerParameters(command=sys.executable, args=list(SERVER_ARGS), env=environment(changed))
    async with Client(parameters) as client:
        process = own_child(*SERVER_ARGS)
        if process is None:
            raise MeasurementFailed("The server answers, but is not in the process table.")
        yield BenchServer(client, process, changed)


def pool_of(subject: Subject, ready: int) -> dict[str, object]:
    """Return settings for a pool that keeps up to `ready` machines of the template under test, and no others.

    A minimum applies to every built template. Without one, the pool keeps machines of the templates in demand.
    """
    memory_mb = ready * subject.built.template.machine.host_mb
    return {"pool.min": 0, "pool.max": ready, "pool.memory_mb": memory_mb, "pool.idle_s": POOL_IDLE_S}


def is_idle(stats: Stats, ready: int) -> bool:
    """Whether a server has `ready` machines in its pool and no others."""
    idle = {"starting": 0, "running": ready, "ending": 0}
    return bool(sum(_pools(stats).values()) == ready and stats["machines"] == idle)


def _pools(stats: Stats) -> dict[str, int]:
    """Return the number of ready machines by template."""
    return {pool["template"]: pool["ready"] for pool in stats["pools"]}


def sandbox_of(created: CallToolResult) -> str:
    """Return the id from the result of `create_sandbox`."""
    return SandboxView.model_validate(created.structured_content).sandbox_id
