"""Nothing outlives its owner: whatever ends the server, its machines, groups and files are gone five seconds later.

How a machine dies is up to its driver, so every driver is tried where a server ends in the middle of things; the rest
is tried with the one in force.
"""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from mcp_sandbox.app import Host
from mcp_sandbox.config import load_settings, variable_of
from mcp_sandbox.machines.provider import HostFacts
from templates.build import BuiltTemplate
from tests.footprint import assert_gone, assert_no_more_empty_groups, empty_groups, groups_of
from tests.waiting import HANG_S, LOOK_AGAIN_S, promised

pytestmark = pytest.mark.vm

ROOT = Path(__file__).parents[2]
SERVER = (sys.executable, "-m", "mcp_sandbox")
# A client between the test and the server: it starts the server on its own stdin and stdout, and waits.
PARENT = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")
MAX_LINE_BYTES = 1 << 20
STUBBORN = "import time\nwhile True:\n    try:\n        while True: time.sleep(1)\n    except BaseException: pass"


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a server has on this host."""

    server: psutil.Process
    machines: list[psutil.Process]  # each is the first of a tree
    processes: list[psutil.Process]  # all of those trees
    groups: list[Path]
    temporary: Path

    async def assert_gone(self) -> None:
        await assert_gone([self.server, *self.processes], self.groups, load_settings().run_dir)
        assert list(self.temporary.iterdir()) == []


class Connection:
    """Speaks JSON lines, so that nothing of an SDK's own clean-up gets in the way."""

    def __init__(self, process: Process, temporary: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self._temporary = temporary
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._last_id = 0

    async def send(self, method: str, params: dict[str, Any], **more: object) -> None:
        assert self.process.stdin is not None
        message = {"jsonrpc": "2.0", "method": method, "params": params, **more}
        await self.process.stdin.send(json.dumps(message).encode() + b"\n")

    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._last_id += 1
        await self.send(method, params, id=self._last_id)
        while True:
            message = json.loads(await self._lines.receive_until(b"\n", MAX_LINE_BYTES))
            if message.get("id") == self._last_id:
                result: dict[str, Any] = message["result"]
                return result

    async def start(self, sandboxes: int = 1) -> str:
        """Shake hands and create sandboxes; the id of the last one."""
        client = {"name": "raw", "version": "0"}
        await self.ask("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client})
        await self.send("notifications/initialized", {})
        for _ in range(sandboxes):
            result = await self.ask("tools/call", {"name": "create_sandbox", "arguments": {}})
        sandbox_id: str = result["structuredContent"]["sandbox_id"]
        return sandbox_id

    async def start_running(self, sandbox_id: str, code: str) -> None:
        """Have code run that does not end; return when it does run."""
        begin = f"open('/workspace/started', 'w').close()\n{code}"
        arguments = {"code": begin, "sandbox_id": sandbox_id, "timeout_s": 100}
        await self.send("tools/call", {"name": "run_code", "arguments": arguments}, id="endless")
        look = {"name": "list_files", "arguments": {"sandbox_id": sandbox_id}}
        while "/workspace/started" not in json.dumps(await self.ask("tools/call", look)):
            pass

    def footprint(self, server: psutil.Process | None = None) -> Footprint:
        server = server or psutil.Process(self.process.pid)
        machines, processes = server.children(), server.children(recursive=True)
        groups = [group for machine in machines for group in groups_of(machine.pid)]
        assert machines
        return Footprint(server, machines, processes, groups, self._temporary)


@asynccontextmanager
async def connected(
    directory: Path, driver: str, *, before: Sequence[str] = (), **settings: object
) -> AsyncIterator[Connection]:
    """A server, or what starts one, on pipes. The block has a deadline. No machine is kept ready unless asked for."""
    temporary = directory / "tmp"
    temporary.mkdir()
    settings = {"driver": driver, "pool_max": 0, **settings}
    variables = {variable_of(name): str(value) for name, value in settings.items()}
    environment = {**os.environ, "TMPDIR": str(temporary), **variables}
    with anyio.fail_after(HANG_S), (directory / "stderr").open("wb") as stderr:
        process = await anyio.open_process([*before, *SERVER], cwd=ROOT, env=environment, stderr=stderr)
        try:
            yield Connection(process, temporary)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            with anyio.move_on_after(promised(), shield=True):
                await process.wait()
            with anyio.CancelScope(shield=True):
                await process.aclose()  # kills it, if need be


@pytest.fixture(autouse=True)
async def no_more_empty_groups() -> AsyncIterator[None]:
    """Also machines no test has looked at leave nothing."""
    before = empty_groups()
    yield
    await assert_no_more_empty_groups(before)


async def exit_status(process: Process) -> int:
    with anyio.fail_after(promised()):
        return await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_server_and_its_machines(in_force: HostFacts, tmp_path: Path, number: signal.Signals):
    async with connected(tmp_path, in_force.driver) as connection:
        await connection.start(sandboxes=2)
        footprint = connection.footprint()
        assert len(footprint.machines) == 2
        connection.process.send_signal(number)
        assert await exit_status(connection.process) == 0
        await footprint.assert_gone()


async def test_machines_kept_ready_end_with_the_server_too(in_force: HostFacts, tmp_path: Path):
    async with connected(tmp_path, in_force.driver, pool_min=2, pool_max=2) as connection:
        await connection.start()
        footprint = connection.footprint()
        while len(footprint.machines) < 3:
            await anyio.sleep(LOOK_AGAIN_S)
            footprint = connection.footprint()
        connection.process.terminate()
        assert await exit_status(connection.process) == 0
        await footprint.assert_gone()


async def test_a_client_that_closes_stdin_ends_the_server_and_its_machines(in_force: HostFacts, tmp_path: Path):
    async with connected(tmp_path, in_force.driver) as connection:
        await connection.start()
        footprint = connection.footprint()
        assert connection.process.stdin is not None
        await connection.process.stdin.aclose()
        assert await exit_status(connection.process) == 0
        await footprint.assert_gone()


async def test_a_client_killed_with_sigkill_takes_the_server_and_its_machines_along(
    in_force: HostFacts, tmp_path: Path
):
    """The server's stdin stays open: the test holds the other end of the pipe."""
    async with connected(tmp_path, in_force.driver, before=PARENT) as connection:
        await connection.start()
        [server] = psutil.Process(connection.process.pid).children()
        footprint = connection.footprint(server)
        connection.process.kill()
        await exit_status(connection.process)
        await footprint.assert_gone()


async def test_the_machines_of_a_server_killed_with_sigkill_die_with_it(
    host: Host, built: BuiltTemplate, tmp_path: Path
):
    async with connected(tmp_path, host.driver.name) as connection:
        await connection.start(sandboxes=2)
        footprint = connection.footprint()
        connection.process.kill()
        await exit_status(connection.process)
        try:
            await assert_gone([footprint.server, *footprint.processes], [], load_settings().run_dir)
            assert list(footprint.temporary.iterdir()) == []
        finally:
            _remove(footprint.groups)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make control groups here")
async def test_the_next_server_removes_the_groups_of_one_that_was_killed(in_force: HostFacts, tmp_path: Path):
    async with connected(tmp_path, in_force.driver) as connection:
        await connection.start()
        footprint = connection.footprint()
        connection.process.kill()
        await exit_status(connection.process)
    try:
        (tmp_path / "next").mkdir()
        async with connected(tmp_path / "next", in_force.driver) as connection:
            await connection.start()
            assert [group for group in footprint.groups if group.exists()] == []
    finally:
        _remove(footprint.groups)


@pytest.mark.parametrize("code", ["while True: pass", STUBBORN], ids=["endless", "stubborn"])
@pytest.mark.parametrize("how", ["signal", "stdin"])
async def test_a_server_ends_in_time_in_the_middle_of_a_run(
    host: Host, built: BuiltTemplate, tmp_path: Path, code: str, how: str
):
    async with connected(tmp_path, host.driver.name) as connection:
        sandbox_id = await connection.start()
        await connection.start_running(sandbox_id, code)
        footprint = connection.footprint()
        assert connection.process.stdin is not None
        if how == "signal":
            connection.process.terminate()
        else:
            await connection.process.stdin.aclose()
        assert await exit_status(connection.process) == 0
        await footprint.assert_gone()


async def test_a_server_ends_in_time_in_the_middle_of_a_restore(host: Host, built: BuiltTemplate, tmp_path: Path):
    async with connected(tmp_path, host.driver.name) as connection:
        await connection.start()
        footprint = connection.footprint()
        for number in range(4):
            await connection.send("tools/call", {"name": "create_sandbox", "arguments": {}}, id=f"box-{number}")
        while len(footprint.machines) < 2:
            footprint = connection.footprint()
        connection.process.terminate()
        assert await exit_status(connection.process) == 0
        await footprint.assert_gone()


async def test_closing_a_sandbox_ends_its_machine_and_no_other(host: Host, built: BuiltTemplate, tmp_path: Path):
    async with connected(tmp_path, host.driver.name) as connection:
        sandbox_id = await connection.start()
        first = connection.footprint()
        await connection.ask("tools/call", {"name": "create_sandbox", "arguments": {}})
        both = connection.footprint()
        await connection.ask("tools/call", {"name": "close_sandbox", "arguments": {"sandbox_id": sandbox_id}})
        await assert_gone(first.processes, first.groups, load_settings().run_dir)
        left = connection.footprint()
        assert set(left.machines) == set(both.machines) - set(first.machines)


async def test_an_idle_sandbox_ends_by_itself(in_force: HostFacts, tmp_path: Path):
    async with connected(tmp_path, in_force.driver, lifetime_idle_s=1) as connection:
        sandbox_id = await connection.start()
        footprint = connection.footprint()
        await assert_gone(footprint.processes, footprint.groups, load_settings().run_dir)
        arguments = {"code": "1", "sandbox_id": sandbox_id}
        answer = await connection.ask("tools/call", {"name": "run_code", "arguments": arguments})
        assert answer["isError"]
        assert "expired: it was idle for 1 s" in answer["content"][0]["text"]
        assert "create_sandbox" in answer["content"][0]["text"]


def _remove(groups: Sequence[Path]) -> None:
    """A server that was killed cannot take its groups away. They are empty, so this does."""
    for group in groups:
        with suppress(FileNotFoundError):
            group.rmdir()
