"""`mcp-sandbox demo`: a tour of the product with a real server and a real MCP client on stdio."""

import base64
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, MCPError, StdioServerParameters
from mcp_types import CallToolResult, ImageContent
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Column, Table

from mcp_sandbox.commands import template_build
from mcp_sandbox.commands.common import SERVER_ARGS, environment, report_errors, run_of, text_of
from mcp_sandbox.commands.demo_site import TABLE_PATH, demo_site
from mcp_sandbox.commands.doctor import examine
from mcp_sandbox.commands.doctor_view import show_verdict
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.machines.web import TEMPLATE as WEB_TEMPLATE
from mcp_sandbox.private import users_umask
from mcp_sandbox.serving.lifetime import run_command
from mcp_sandbox.views import PAGE_META, ArtifactList, PageView, SandboxList, SandboxView
from vmm.process_table import ProcessId, children_of, is_alive, of_pid, own_child

TOUR_S = 180.0  # it takes seconds, but far longer on a busy host under emulation
CHART = Path("demo-output") / "chart.png"

FIRST = "import random\nnumbers = [random.gauss(100, 15) for _ in range(1000)]\nlen(numbers)"
SECOND = "sum(numbers) / len(numbers)   # `numbers` is still there"
TABLE = """\
import pandas as pd
walk = pd.DataFrame({"day": range(90), "step": numbers[:90]})
walk["price"] = 500 + (walk.step - 100).cumsum()
walk.describe().round(1)"""
FIGURE = """\
import matplotlib.pyplot as plt
plt.figure(figsize=(6, 3))
plt.plot(walk.day, walk.price)
plt.title("90 days of chance")
plt.show()"""
FROM_WEB = """\
rain = pd.read_csv({path!r}).set_index("station")   # this sandbox is offline
rain.sum(axis=1).sort_values()"""
FRESH = '"numbers" in globals()   # nothing is shared between sandboxes'

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@dataclass(eq=False)
class DemoFailed(SandboxError):
    """The demo could not be completed."""

    code = "demo_failed"
    sentence = "{reason}"
    reason: str


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a step of the tour took for the client, and what the server reported."""

    step: str
    client_ms: float
    server: str = ""


def main(settings: Settings) -> int:
    """Build the template if necessary, run the tour and return an exit code."""
    status = template_build.build(settings, (), every=False, watch=False)
    if status != 0:
        return status
    return report_errors(lambda: _run_demo(settings))


def _run_demo(settings: Settings) -> int:
    try:
        return run_command(lambda: _demo(settings))
    except MCPError as error:
        raise DemoFailed(f"The server refused a call or ended: {error}") from error
    except TimeoutError:
        raise DemoFailed(f"The tour took longer than {TOUR_S:.0f} s and was stopped.") from None


async def _demo(settings: Settings) -> int:
    with err.status("probing this host"):
        report = await examine(settings)
    show_verdict(report, out)
    if not report.ready:
        return 1
    web = settings.web_tools and any(template.name == WEB_TEMPLATE and template.built for template in report.templates)
    with anyio.fail_after(TOUR_S), demo_site() as (address, reachable):
        machines, timings = await _tour(settings.changed(reachable), address if web else None)
    _show_timings(timings)
    left = sum(is_alive(machine) for machine in machines)
    out.print(f"{'[green]✓[/]' if left == 0 else '[red]✗[/]'} [bold]{left} machines left[/]")
    return 0 if left == 0 else 1


async def _tour(settings: Settings, site: str | None) -> tuple[set[ProcessId], list[Timing]]:
    """Start a server, call its tools, and return the machines that ran and the timings.

    With the address of a site, a table of it is fetched and analysed.
    """
    began = time.perf_counter()
    parameters = StdioServerParameters(command=sys.executable, args=list(SERVER_ARGS), env=environment(settings))
    async with Client(parameters) as client:
        started = Timing("start and initialize the server", 1000 * (time.perf_counter() - began))
        server = own_child(*SERVER_ARGS)
        if server is None:
            raise DemoFailed("The server answers but is not in the process table.")
        tour = Tour(client, started)
        sandbox_id = await tour.create()
        machines = _children(server)
        if not machines:
            raise DemoFailed("The server created a sandbox without starting a process for it.")
        processes = ", ".join(str(machine.pid) for machine in sorted(machines, key=lambda machine: machine.pid))
        out.print(f"  the server's machines are processes {processes}: this sandbox and the pool")
        await tour.run(sandbox_id, "some code", FIRST)
        await tour.run(sandbox_id, "more code, with state kept", SECOND)
        await tour.run(sandbox_id, "a pandas table", TABLE)
        await tour.run(sandbox_id, "a matplotlib chart", FIGURE)
        await tour.save_chart(sandbox_id, CHART)
        if site is not None:
            await tour.run(sandbox_id, "the table of the web", await tour.fetch(sandbox_id, site))
        else:
            out.print(f"\n`mcp-sandbox template build {WEB_TEMPLATE}` adds a step with the web tools.")
        await tour.run(None, "a one-off run in a fresh sandbox", FRESH)
        await tour.close(sandbox_id)
        return machines | _children(server), tour.timings


def _children(server: ProcessId) -> set[ProcessId]:
    return {process for pid in children_of(server.pid) if (process := of_pid(pid))}


class Tour:
    """Calls tools, prints the results and records the timings."""

    def __init__(self, client: Client, started: Timing) -> None:
        self._client = client
        self.timings = [started]

    async def create(self) -> str:
        """Create a sandbox and return its id."""
        _headline("create_sandbox")
        result = await self._call("create sandbox", "create_sandbox", {})
        view = SandboxView.model_validate(result.structured_content)
        self._note(f"restore {view.restore_ms:.0f} ms")
        accel = f", {view.accel}" if view.accel else ""
        out.print(
            f"  {view.sandbox_id}: {view.template}, isolation {view.isolation} "
            f"({view.driver}{accel}), {view.memory_mb} MB, network {view.network}"
        )
        return view.sandbox_id

    async def run(self, sandbox_id: str | None, step: str, code: str) -> None:
        """Run code and print it with its result. Without `sandbox_id` it runs in a fresh sandbox."""
        _headline(f"run_code: {step}")
        out.print(Padding(Syntax(code, "python", theme="ansi_dark", background_color="default"), (0, 2)))
        where = {"sandbox_id": sandbox_id} if sandbox_id else {}
        result = await self._call(step, "run_code", {**where, "code": code})
        view, text = run_of(result), text_of(result)
        if view.status != "ok":
            raise DemoFailed(f"The code failed:\n{text}")
        timings = {"queue": view.timings.queue_ms, "restore": view.timings.restore_ms, "run": view.timings.run_ms}
        self._note(", ".join(f"{phase} {ms:.0f} ms" for phase, ms in timings.items() if ms >= 1))
        out.print(Padding(escape(text.strip()), (0, 2)))  # what the model reads

    async def save_chart(self, sandbox_id: str, path: Path) -> None:
        """Read the chart that the last run produced and save it on this host."""
        _headline("list_artifacts, read_artifact")
        listed = await self._call("list artifacts", "list_artifacts", {"sandbox_id": sandbox_id})
        artifacts = ArtifactList.model_validate(listed.structured_content).artifacts
        chart = next((artifact.path for artifact in artifacts if artifact.mime_type == "image/png"), None)
        if chart is None:
            raise DemoFailed("The run left no chart among its artifacts.")
        arguments = {"sandbox_id": sandbox_id, "path": chart}
        result = await self._call("read the chart back", "read_artifact", arguments)
        image = next((block for block in result.content if isinstance(block, ImageContent)), None)
        if image is None:
            raise DemoFailed(f"{chart} was not returned as an image.")
        data = base64.b64decode(image.data)
        with users_umask():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        out.print(f"  {escape(chart)} ({len(data):,} bytes) saved as [bold]{path.absolute()}[/]", soft_wrap=True)

    async def fetch(self, sandbox_id: str, site: str) -> str:
        """Read a page, fetch the table it names into the sandbox, and return code that analyses it."""
        _headline("fetch_url: a page, and a table for the sandbox")
        page = await self._call("fetch a page", "fetch_url", {"url": f"{site}/"})
        out.print(Padding(escape(text_of(page).strip()), (0, 2)))
        arguments = {"url": site + TABLE_PATH, "sandbox_id": sandbox_id}
        table = await self._call("fetch a table", "fetch_url", arguments)
        saved = PageView.model_validate({**(table.meta or {})[PAGE_META], "text": None}, strict=False).saved
        if saved is None:
            raise DemoFailed("fetch_url saved no file.")
        out.print(f"  {TABLE_PATH} is {saved.path} in the sandbox")
        return FROM_WEB.format(path=saved.path)

    async def close(self, sandbox_id: str) -> None:
        """Close the sandbox and check that the server no longer lists it."""
        _headline("close_sandbox")
        await self._call("close sandbox", "close_sandbox", {"sandbox_id": sandbox_id})
        listed = await self._call("list sandboxes", "list_sandboxes", {})
        if alive := SandboxList.model_validate(listed.structured_content).sandboxes:
            raise DemoFailed(f"The server still has sandboxes: {alive}")
        out.print("  the server has no sandboxes left")

    async def _call(self, step: str, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        began = time.perf_counter()
        result = await self._client.call_tool(tool, arguments)
        self.timings.append(Timing(step, 1000 * (time.perf_counter() - began)))
        if result.is_error:
            raise DemoFailed(f"{tool} failed: {text_of(result)}")
        return result

    def _note(self, server: str) -> None:
        last = self.timings[-1]
        self.timings[-1] = Timing(last.step, last.client_ms, server)


def _headline(text: str) -> None:
    out.print(f"\n[bold cyan]{escape(text)}[/]")


def _show_timings(timings: list[Timing]) -> None:
    out.print()
    table = Table("step", Column("client, ms", justify="right"), "reported by the server")
    for timing in timings:
        table.add_row(timing.step, f"{timing.client_ms:.0f}", timing.server)
    out.print(table)
