"""What the bench times, and under which conditions: the figures must be like for like."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from guest.client import AgentClient
from mcp_sandbox.commands import bench
from mcp_sandbox.commands.bench import Plan
from vmm.types import Usage

if TYPE_CHECKING:
    from mcp_sandbox.app import Host
    from templates.build import BuiltTemplate


class BootingHost:
    """Boots machines that do nothing, and knows how many of them boot at once."""

    def __init__(self) -> None:
        self.driver = self
        self.booting: set[str] = set()
        self.company: dict[str, int] = {}
        self.alive = self.most_alive = 0

    @asynccontextmanager
    async def launch(self, name: str) -> AsyncIterator[SimpleNamespace]:
        self.booting.add(name)
        self.alive += 1
        self.most_alive = max(self.alive, self.most_alive)
        for other in self.booting:
            self.company[other] = max(self.company.get(other, 0), len(self.booting))

        async def connect() -> str:
            return name

        async def usage() -> Usage:
            return Usage(10**6, 0, 0.0)

        try:
            yield SimpleNamespace(connect=connect, usage=usage)
        finally:
            self.alive -= 1

    @asynccontextmanager
    async def open(self, name: str, **_: Any) -> AsyncIterator[SimpleNamespace]:
        async def warm(*_: object, **__: object) -> None:
            await anyio.wait_all_tasks_blocked()
            self.booting.discard(name)

        yield SimpleNamespace(warm=warm)


async def test_a_cold_boot_that_is_timed_has_the_host_to_itself(monkeypatch: pytest.MonkeyPatch):
    async def first_run(_agent: object) -> None: ...

    host = BootingHost()
    monkeypatch.setattr(AgentClient, "open", host.open)
    monkeypatch.setattr(bench, "_first_run", first_run)
    template = SimpleNamespace(warmup=SimpleNamespace(code=""))
    built = cast("BuiltTemplate", SimpleNamespace(spec=lambda name: name, template=template))
    plan = Plan(restores=1, clones=1, cold_boots=6, timed_boots=2, calls=1)
    with anyio.fail_after(5):
        time, memory = await bench._cold_boots(cast("Host", host), built, plan, lambda _: None)
    assert (time.samples, memory.samples, host.most_alive) == (2, 6, 6)
    assert [host.company[f"bench-cold-{number}"] for number in range(2)] == [1, 1]
    assert max(host.company.values()) == 2
    assert "warm-up" in time.name
