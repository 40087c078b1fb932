"""Nothing outlives its owner: five seconds after a server has ended, its machines, cgroups and files are gone.

How a machine dies is up to its driver, so every driver is tried where a server ends in the middle of something. The
rest is tried with the driver that `auto` chooses.
"""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
import pytest

from mcp_sandbox.app import Host
from mcp_sandbox.config import load_settings
from mcp_sandbox.machines.provider import HostFacts
from templates.build import BuiltTemplate
from tests.footprint import assert_gone, assert_no_more_empty_groups, empty_groups, groups_of
from tests.functional.mcp_client import SERVER, server_environment
from tests.functional.raw_client import PARENT, RawClient, started
from tests.waiting import HANG_S, LOOK_AGAIN_S, assert_soon_empty, promised

pytestmark = pytest.mark.vm

STUBBORN = "import time\nwhile True:\n    try:\n        while True: time.sleep(1)\n    except BaseException: pass"


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a server has on this host."""

    server: psutil.Process
    machines: list[psutil.Process]  # each is the first of a tree
    processes: list[psutil.Process]  # all of those trees
    groups: list[Path]

    @classmethod
    def of(cls, server: psutil.Process) -> "Footprint":
        machines, processes = server.children(), server.children(recursive=True)
        groups = [group for machine in machines for group in groups_of(machine.pid)]
        assert machines
        return cls(server, machines, processes, groups)

    async def assert_gone(self, *, with_groups: bool = True) -> None:
        groups = self.groups if with_groups else []
        await assert_gone([self.server, *self.processes], groups, load_settings().run_dir)

    async def remove_groups(self) -> None:
        """Remove what a killed server could not remove. A cgroup stays busy until init has reaped its processes."""

        def left() -> list[Path]:
            for group in self.groups:
                with suppress(OSError):
                    group.rmdir()
            return [group for group in self.groups if group.exists()]

        await assert_soon_empty(left, HANG_S)


class Connection(RawClient):
    """A client of a server with real machines."""

    async def start_running(self, sandbox_id: str, code: str) -> None:
        """Run code that does not end; return once it runs."""
        begin = f"open('/workspace/started', 'w').close()\n{code}"
        await self.start_call("run_code", code=begin, sandbox_id=sandbox_id, timeout_s=100)
        while "/workspace/started" not in json.dumps(await self.call("list_files", sandbox_id=sandbox_id)):
            pass

    def footprint(self) -> Footprint:
        return Footprint.of(psutil.Process(self.process.pid))


@asynccontextmanager
async def connected(
    directory: Path, driver: str, *, before: Sequence[str] = (), **settings: object
) -> AsyncIterator[Connection]:
    """Start a server, or a program that starts one. No machine is kept ready unless asked for."""
    temporary = directory / "tmp"
    temporary.mkdir()
    environment = server_environment(**{"driver": driver, "pool_max": 0, **settings}) | {"TMPDIR": str(temporary)}
    async with started([*before, sys.executable, *SERVER], directory / "stderr", environment) as client:
        yield Connection(client.process)
    assert list(temporary.iterdir()) == []


@pytest.fixture(autouse=True)
async def no_more_empty_groups() -> AsyncIterator[None]:
    """Check that machines leave nothing, including those that no test looked at."""
    before = empty_groups()
    yield
    await assert_no_more_empty_groups(before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_the_server_and_its_machines(in_force: HostFacts, tmp_path: Path, number: signal.Signals):
    async with connected(tmp_path, in_force.driver) as connection:
        await connection.start(sandboxes=2)
        footprint = connection.footprint()
        assert len(footprint.machines) == 2
        connection.process.send_signal(number)
        assert await connection.exit_status() == 0
        await footprint.assert_gone()


async def test_machines_kept_ready_end_with_the_server_too(in_force: HostFacts, tmp_path: Path):
    async with connected(tmp_path, in_force.driver, pool_min=2, pool_max=2) as connection:
        await connection.start()
        footprint = connection.footprint()
        while len(footprint.machines) < 3:
            await anyio.sleep(LOOK_AGAIN_S)
            footprint = connection.footprint()
        connection.process.terminate()
        assert await connection.exit_status() == 0
        await footprint.assert_gone()


async def test_a_client_that_closes_stdin_ends_the_server_and_its_machines(in_force: HostFacts, tmp_path: Path):
    async with connected(tmp_path, in_force.driver) as connection:
        await connection.start()
        footprint = connection.footprint()
        await connection.close_stdin()
        assert await connection.exit_status() == 0
        await footprint.assert_gone()


async def test_killing_a_client_with_sigkill_ends_the_server_and_its_machines(in_force: HostFacts, tmp_path: Path):
    """The server's stdin stays open: the test holds the other end of the pipe."""
    async with connected(tmp_path, in_force.driver, before=PARENT) as connection:
        await connection.start()
        [server] = psutil.Process(connection.process.pid).children()
        footprint = Footprint.of(server)
        connection.process.kill()
        await connection.exit_status()
        await footprint.assert_gone()


async def test_the_machines_of_a_server_killed_with_sigkill_die_with_it(
    host: Host, built: BuiltTemplate, tmp_path: Path
):
    async with connected(tmp_path, host.driver.name) as connection:
        await connection.start(sandboxes=2)
        footprint = connection.footprint()
        connection.process.kill()
        await connection.exit_status()
        try:
            await footprint.assert_gone(with_groups=False)
        finally:
            await footprint.remove_groups()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make cgroups here")
async def test_the_next_server_removes_the_groups_of_one_that_was_killed(in_force: HostFacts, tmp_path: Path):
    async with connected(tmp_path, in_force.driver) as connection:
        await connection.start()
        footprint = connection.footprint()
        connection.process.kill()
        await connection.exit_status()
    try:
        (tmp_path / "next").mkdir()
        async with connected(tmp_path / "next", in_force.driver) as connection:
            await connection.start()
            await assert_soon_empty(lambda: [group for group in footprint.groups if group.exists()], promised())
    finally:
        await footprint.remove_groups()


@pytest.mark.parametrize("code", ["while True: pass", STUBBORN], ids=["endless", "stubborn"])
@pytest.mark.parametrize("how", ["signal", "stdin"])
async def test_a_server_ends_in_time_in_the_middle_of_a_run(
    host: Host, built: BuiltTemplate, tmp_path: Path, code: str, how: str
):
    async with connected(tmp_path, host.driver.name) as connection:
        sandbox_id = await connection.start()
        await connection.start_running(sandbox_id, code)
        footprint = connection.footprint()
        if how == "signal":
            connection.process.terminate()
        else:
            await connection.close_stdin()
        assert await connection.exit_status() == 0
        await footprint.assert_gone()


async def test_a_server_ends_in_time_in_the_middle_of_a_restore(host: Host, built: BuiltTemplate, tmp_path: Path):
    async with connected(tmp_path, host.driver.name) as connection:
        await connection.start()
        footprint = connection.footprint()
        for number in range(4):
            await connection.start_call("create_sandbox", request_id=f"box-{number}")
        while len(footprint.machines) < 2:
            footprint = connection.footprint()
        connection.process.terminate()
        assert await connection.exit_status() == 0
        await footprint.assert_gone()


async def test_closing_a_sandbox_ends_its_machine_and_no_other(host: Host, built: BuiltTemplate, tmp_path: Path):
    async with connected(tmp_path, host.driver.name) as connection:
        sandbox_id = await connection.start()
        first = connection.footprint()
        await connection.call("create_sandbox")
        both = connection.footprint()
        await connection.call("close_sandbox", sandbox_id=sandbox_id)
        await assert_gone(first.processes, first.groups, load_settings().run_dir)
        left = connection.footprint()
        assert set(left.machines) == set(both.machines) - set(first.machines)


async def test_an_idle_sandbox_ends_by_itself(in_force: HostFacts, tmp_path: Path):
    async with connected(tmp_path, in_force.driver, lifetime_idle_s=1) as connection:
        sandbox_id = await connection.start()
        await assert_soon_empty(psutil.Process(connection.process.pid).children, HANG_S)
        answer = await connection.call("run_code", code="1", sandbox_id=sandbox_id)
        assert answer["isError"]
        assert "expired: it was idle for 1 s" in answer["content"][0]["text"]
        assert "create_sandbox" in answer["content"][0]["text"]
