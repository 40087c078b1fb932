"""A server killed with SIGKILL at any moment leaves nothing that the next one does not find and remove."""

import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from mcp import Client, MCPError

from mcp_sandbox.operating import database
from tests.footprint import mounts
from tests.functional.checkout import REPO
from tests.functional.mcp_client import SERVER, call, data_of, server_parameters, text_of
from tests.session import current
from tests.waiting import BUILD_S, HANG_S, assert_soon_empty, promised
from vmm.hierarchy import detect
from vmm.process_table import ProcessId, is_alive, own_child, tree_of

pytestmark = [pytest.mark.vm, pytest.mark.timeout(3600)]

ROUNDS = 30
SEED = "CRASH_SEED"  # environment variable with the number that a failed test printed
CALLERS = 3
LONGEST_S = 3.0  # enough for a caller to get a machine, use it and close it
CLEAN_S = 15.0  # three times what is promised: the server may still be loading when we begin to look


@pytest.fixture(scope="module")
def home() -> Path:
    """A home that no other test uses, with everything that is built on this host."""
    subprocess.run([sys.executable, *SERVER, "template", "build"], cwd=REPO, check=True, timeout=BUILD_S)
    return current().new_home("crashes")


@dataclass(frozen=True, slots=True)
class Moment:
    """When a server is killed: this long after it was first asked for a sandbox, or after it first created one."""

    of_a_busy_server: bool
    after_s: float


@dataclass(frozen=True, slots=True)
class Killed:
    """A killed server and the processes it had."""

    server: ProcessId
    processes: tuple[ProcessId, ...]

    def frozen(self, home: Path) -> list[Path]:
        """The files of its paused sandboxes."""
        files = (home / "run").glob(f"{self.server.pid}-{self.server.started}-*")
        return [path for path in files if not path.is_socket()]

    def left(self) -> list[object]:
        """Its processes and cgroups that are still on this host."""
        name = f"{self.server.pid}-{self.server.started}-*"
        return [
            *filter(is_alive, self.processes),
            *(group for folder in group_folders() for group in folder.glob(name)),
        ]


def group_folders() -> list[Path]:
    """Where the servers of this test have their machines' cgroups: they inherit the cgroups of this process."""
    return list(detect().folders)


@asynccontextmanager
async def connected(home: Path, temporary: Path, *options: str) -> AsyncIterator[tuple[Client, ProcessId]]:
    """A server of `home` and its client. Servers that live at the same time are told apart by their options."""
    parameters = server_parameters(*options, temporary=str(temporary), home=home, toolsets="advanced")
    with anyio.fail_after(HANG_S):
        async with Client(parameters) as client:
            process = await anyio.to_thread.run_sync(own_child, *SERVER, *options)
            assert process is not None
            yield client, process


async def create_sandbox(client: Client, code: str) -> str:
    """Create a sandbox and run code in it."""
    sandbox_id: str = (await data_of(client, "create_sandbox"))["sandbox_id"]
    await call(client, "run_code", sandbox_id=sandbox_id, code=code)
    return sandbox_id


async def use_sandboxes(client: Client, first: anyio.Event) -> None:
    """Create, run, fork, pause and close, again and again, until the server is gone."""
    with suppress(MCPError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        while True:
            created = await client.call_tool("create_sandbox", {})
            assert created.structured_content is not None, created
            first.set()
            sandbox = {"sandbox_id": created.structured_content["sandbox_id"]}
            await client.call_tool("run_code", {"code": "sum(range(1000))", **sandbox})
            forked = await client.call_tool("fork_sandbox", sandbox)
            assert forked.structured_content is not None, forked
            await client.call_tool("pause_sandbox", sandbox)
            for copy in (*forked.structured_content["copies"], sandbox):
                await client.call_tool("close_sandbox", {"sandbox_id": copy["sandbox_id"]})


def kill(server: ProcessId) -> Killed:
    """Kill a server; return the processes it had at that moment."""
    os.kill(server.pid, signal.SIGSTOP)  # so that nothing is started between the look and the kill
    tree = tree_of(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    return Killed(server, tree)


async def kill_under_load(home: Path, temporary: Path, dead: list[Killed], moment: Moment) -> Killed:
    """Start a server, check that it removes what the dead ones left, and kill it while it is busy."""
    first = anyio.Event()
    async with connected(home, temporary) as (client, server), anyio.create_task_group() as callers:
        await assert_nothing_left(home, dead, server)
        for _ in range(CALLERS):
            callers.start_soon(use_sandboxes, client, first)
        if moment.of_a_busy_server:
            await first.wait()
        await anyio.sleep(moment.after_s)
        killed = kill(server)
        callers.cancel_scope.cancel()
    return killed


async def assert_nothing_left(home: Path, dead: list[Killed], *alive: ProcessId) -> None:
    """Wait until there is nothing but what belongs to servers that are alive."""
    await assert_soon_empty(lambda: left_over(home, dead, alive), promised(CLEAN_S))


def left_over(home: Path, dead: list[Killed], alive: tuple[ProcessId, ...]) -> list[object]:
    marks = tuple(f"{server.pid}-{server.started}-" for server in alive)
    run = home / "run"
    return [
        *(thing for killed in dead[-1:] for thing in killed.left()),
        *(path for path in (run.iterdir() if run.exists() else ()) if not path.name.startswith(marks)),
        *(server for server in database.read_home(home) if server.process not in alive),
    ]


async def test_after_a_server_killed_under_load_the_next_one_cleans_up(home: Path, tmp_path: Path):
    seed = os.environ.get(SEED) or str(secrets.randbits(32))
    print(f"{SEED}={seed}")  # shown when it fails
    chance = random.Random(seed)
    before, dead, had_machines = mounts(), list[Killed](), 0
    for number in range(ROUNDS):
        moment = Moment(number % 2 == 1, chance.uniform(0, LONGEST_S))
        dead.append(await kill_under_load(home, tmp_path, dead, moment))
        had_machines += len(dead[-1].processes) > 1
    async with connected(home, tmp_path) as (_, last):
        await assert_nothing_left(home, dead, last)
        assert [thing for killed in dead for thing in killed.left()] == []
    await assert_nothing_left(home, dead)
    assert had_machines > ROUNDS / 3, "most servers were killed before they had a machine"
    assert mounts() == before
    assert list(tmp_path.iterdir()) == []


async def test_a_killed_server_does_not_affect_another_one_of_the_same_home(home: Path, tmp_path: Path):
    async with connected(home, tmp_path, "--log-level", "ERROR") as (client, alive):
        box, paused = await create_sandbox(client, "kept = 41"), await create_sandbox(client, "kept = 1")
        await call(client, "pause_sandbox", sandbox_id=paused)
        async with connected(home, tmp_path) as (other, server):
            await create_sandbox(other, "kept = 0")
            await call(other, "pause_sandbox", sandbox_id=await create_sandbox(other, "kept = 0"))
            killed = kill(server)
        assert killed.frozen(home), "it left nothing"
        async with connected(home, tmp_path) as (_, third):
            await assert_nothing_left(home, [killed], alive, third)
            assert {known.process for known in database.read_home(home)} == {alive, third}
        await call(client, "resume_sandbox", sandbox_id=paused)
        for sandbox, answer in ((box, "42"), (paused, "2")):
            ran = await call(client, "run_code", sandbox_id=sandbox, code="print(kept + 1)")
            assert f"stdout:\n{answer}\n" in text_of(ran)
