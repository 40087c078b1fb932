"""`mcp-sandbox sandbox` and `mcp-sandbox metrics`, with servers that answer and servers that do not."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio.to_thread
import pytest
from typer.testing import CliRunner, Result

from mcp_sandbox.cli import app
from mcp_sandbox.config import Settings
from mcp_sandbox.operating import database
from mcp_sandbox.operating.database import Machine, MachineState
from mcp_sandbox.operating.metrics import Metrics
from mcp_sandbox.operating.operation import Operation
from mcp_sandbox.operating.registry import open_registry
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import ServedSandbox
from tests.unit.fakes import TEMPLATE, FakeProvider
from vmm.process_table import ProcessId
from vmm.types import NetworkMode


@dataclass(frozen=True, slots=True)
class Server:
    """This process as a server."""

    home: Path
    operation: Operation
    service: SandboxService

    async def command(self, *arguments: str) -> Result:
        """Run a command with the same home."""
        call = partial(CliRunner().invoke, app, ["--home", str(self.home), *arguments], env={"COLUMNS": "200"})
        return await anyio.to_thread.run_sync(call)

    def record_another(self, *, started: int = 1, sandbox: str | None = None) -> None:
        """Add a server to the registry that does not answer."""
        db, here = self.operation.registry._db, self.operation.registry.server
        key = database.add_server(db, replace(here, process=ProcessId(here.process.pid, started)))
        machine = Machine("m-1", TEMPLATE, MachineState.RUNNING, 0.0, "fake", "sandbox-1", (), sandbox, "alice")
        database.add_machine(db, key, machine)
        database.update_machine(db, machine)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    settings = Settings.model_validate({"home": tmp_path, "network": {"allow_domains": ["pypi.org"]}})
    async with open_registry(tmp_path) as registry:  # without recovery, which would remove what a test leaves
        operation = Operation(settings, registry, Metrics(registry.own))
        provider = operation.acquiring(operation.restoring(FakeProvider()))
        async with (
            SandboxService(provider, settings, operation) as service,
            operation.controlled(operation.panel(service)),
        ):
            yield Server(tmp_path, operation, service)


async def test_the_list_shows_each_sandboxes_network(server: Server):
    offline = await server.service.create("alice")
    online = await server.service.create("alice", network=NetworkMode.PROXY)
    listed = json.loads((await server.command("sandbox", "list", "--json")).stdout)
    modes = {view["sandbox_id"]: view["network"] for view in listed}
    assert modes == {offline.sandbox_id: "none", online.sandbox_id: "proxy"}
    (line,) = [row for row in (await server.command("sandbox", "list")).stdout.splitlines() if online.sandbox_id in row]
    assert "proxy" in line


async def test_the_list_shows_the_sandboxes_of_servers_that_answer(server: Server):
    box = await server.service.create("alice")
    result = await server.command("sandbox", "list")
    assert result.exit_code == 0
    for word in (box.sandbox_id, "alice", TEMPLATE, "ready"):
        assert word in result.stdout
    [row] = json.loads((await server.command("sandbox", "list", "--json")).stdout)
    view, pid = ServedSandbox.model_validate(row), server.operation.registry.server.process.pid
    assert (view.sandbox_id, view.owner, view.state, view.server_pid) == (box.sandbox_id, "alice", "ready", pid)
    assert view.expires_in_s == pytest.approx(box.expires_in_s, abs=60)


async def test_the_list_shows_what_a_killed_server_left(server: Server):
    server.record_another(sandbox="sb-1")
    result = await server.command("sandbox", "list")
    assert "sb-1" in result.stdout
    assert "left over" in result.stdout
    assert "The next server removes what killed servers left" in result.stderr
    [row] = json.loads((await server.command("sandbox", "list", "--json")).stdout)
    view = ServedSandbox.model_validate(row)
    assert (view.sandbox_id, view.state, view.machine_id, view.expires_in_s) == ("sb-1", "left over", "sandbox-1", None)


async def test_closing_ends_the_sandbox_and_says_so(server: Server):
    box = await server.service.create("alice")
    result = await server.command("sandbox", "close", box.sandbox_id)
    assert (result.exit_code, result.stderr) == (0, f"{box.sandbox_id} is closed.\n")
    assert server.service.alive() == []


async def test_an_unknown_sandbox_cannot_be_closed(server: Server):
    result = await server.command("sandbox", "close", "sb-[red]1")
    assert result.exit_code == 1
    assert "Sandbox 'sb-[red]1' does not exist. `mcp-sandbox sandbox list` shows" in result.stderr


async def test_closing_a_sandbox_of_a_killed_server_says_that_it_has_ended(server: Server):
    server.record_another(sandbox="sb-1")
    result = await server.command("sandbox", "close", "sb-1")
    assert result.exit_code == 1
    pid = server.operation.registry.server.process.pid
    ended = f"Sandbox 'sb-1' was closed (it ended with server {pid}); its variables and files are gone."
    assert result.stderr == f"mcp-sandbox: {ended}\n"


async def test_a_home_without_servers_is_no_error(tmp_path: Path):
    for arguments in (["sandbox", "list"], ["metrics"]):
        result = CliRunner().invoke(app, ["--home", str(tmp_path), *arguments])
        assert (result.exit_code, result.stdout) == (0, "")
    assert list(tmp_path.iterdir()) == []


async def test_the_metrics_of_a_server_carry_its_pid(server: Server):
    await server.service.create("alice")
    result = await server.command("metrics")
    pid = server.operation.registry.server.process.pid
    assert f'mcp_sandbox_acquire_seconds_count{{server="{pid}",template="{TEMPLATE}"}} 1.0' in result.stdout
    assert f'mcp_sandbox_machines{{server="{pid}",state="running",template="{TEMPLATE}"}} 1.0' in result.stdout
