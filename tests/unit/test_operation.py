"""What operators see of a service agrees with what its clients see."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import LimitReached
from mcp_sandbox.operating.metrics import Metrics
from mcp_sandbox.operating.operation import Operation, ServicePanel
from mcp_sandbox.operating.registry import open_registry
from mcp_sandbox.runs.requests import CodeRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.views import RunProgress
from tests.unit.fakes import TEMPLATE, FakeProvider
from tests.unit.test_metrics import value

ME = "me"


@asynccontextmanager
async def watched(home: Path, **limits: object) -> AsyncIterator[tuple[SandboxService, ServicePanel]]:
    """A service and the panel that its operator sees."""
    settings = Settings(home=home, **limits)
    async with open_registry(home) as registry:
        operation = Operation(settings, registry, Metrics(registry.own))
        provider = operation.acquiring(operation.restoring(FakeProvider()))
        with anyio.fail_after(20):
            async with SandboxService(provider, settings, operation) as service:
                yield service, ServicePanel(service, registry, operation.metrics, tuple)


async def test_the_acquire_time_of_a_sandbox_includes_its_wait_in_the_queue(tmp_path: Path):
    async with watched(tmp_path, limits={"sandboxes": 1}) as (service, panel):
        first = await service.create("one")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.create, "two")
            await anyio.wait_all_tasks_blocked()
            assert value(await panel.metrics(), "mcp_sandbox_waiting") == 1
            await anyio.sleep(0.05)  # the wait to be measured
            await service.close("one", first.sandbox_id)
        text = await panel.metrics()
    assert value(text, "mcp_sandbox_waiting") == 0
    assert value(text, "mcp_sandbox_acquire_seconds_count", template=TEMPLATE) == 2
    waited = value(text, "mcp_sandbox_acquire_seconds_sum", template=TEMPLATE)
    assert waited is not None
    assert waited >= 0.05
    assert value(text, "mcp_sandbox_restore_seconds_count", template=TEMPLATE) == 2


async def test_refusals_are_counted_by_the_limit_that_was_reached(tmp_path: Path):
    async with watched(tmp_path, limits={"sandboxes": 1, "paused": 0, "owner_runs": 1}) as (service, panel):
        box = (await service.create(ME)).sandbox_id
        with pytest.raises(LimitReached):
            await service.create(ME)
        with pytest.raises(LimitReached):
            await service.pause(ME, box)
        await service.run_for_client(CodeRun(ME, "forever", box), background=True)
        with pytest.raises(LimitReached):
            await service.run(CodeRun(ME, "1", box))
        text = await panel.metrics()
    for limit in ("limits.sandboxes", "limits.paused", "limits.owner_runs"):
        assert value(text, "mcp_sandbox_refused_total", limit=limit) == 1


async def test_sandboxes_are_counted_by_state(tmp_path: Path):
    async with watched(tmp_path) as (service, panel):
        await service.create("one")
        await service.pause("two", (await service.create("two")).sandbox_id)
        text = await panel.metrics()
    counted = {state: value(text, "mcp_sandbox_sandboxes", state=state) for state in ("ready", "paused", "running")}
    assert counted == {"ready": 1, "paused": 1, "running": 0}


async def test_timed_out_and_stopped_runs_are_counted_separately(tmp_path: Path):
    async with watched(tmp_path) as (service, panel):
        box = (await service.create(ME)).sandbox_id
        await service.run(CodeRun(ME, "forever", box, timeout_s=0.01))
        run = await service.run_for_client(CodeRun(ME, "forever", box), background=True)
        assert isinstance(run, RunProgress)
        await service.stop_run(ME, box, run.run_id)
        await service.run(CodeRun(ME, "1", box))
        text = await panel.metrics()
    for outcome in ("timeout", "stopped", "ok"):
        assert value(text, "mcp_sandbox_runs_total", outcome=outcome) == 1
    assert value(text, "mcp_sandbox_runs_total", outcome="interrupted") is None
