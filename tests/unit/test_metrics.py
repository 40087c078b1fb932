"""Metrics for Prometheus, and optional spans."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mcp_sandbox.errors import HostLost, SandboxError, UnknownTemplate
from mcp_sandbox.machines.provider import MachineRequest
from mcp_sandbox.operating import metrics as metrics_module
from mcp_sandbox.operating.database import Machine, MachineState
from mcp_sandbox.operating.metrics import BUCKETS_S, Measured, Metrics, enable_tracing, merge
from tests.unit.fakes import REQUEST, TEMPLATE, FakeMachine, FakeProvider
from vmm.errors import MachineLost
from vmm.types import Usage


def value(text: str, name: str, **labels: str) -> float | None:
    """Return the one sample that has this name and at least these labels."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) < 2, found
    return found[0] if found else None


def machine(state: MachineState) -> Machine:
    return Machine("m-1", TEMPLATE, state, 0.0)


async def test_the_time_to_start_a_machine_is_measured():
    metrics = Metrics(list)
    source = Measured(Measured(FakeProvider(), metrics, "restore"), metrics, "acquire")
    async with source.acquire(REQUEST):
        pass
    assert value(metrics.text(), "mcp_sandbox_restore_seconds_count", template=TEMPLATE) == 1
    assert value(metrics.text(), "mcp_sandbox_acquire_seconds_count") is None  # only the sandbox knows that
    assert (BUCKETS_S[0], BUCKETS_S[-1]) == (0.001, 30)


async def test_a_failed_start_is_counted_by_its_error_and_not_timed():
    metrics, source = Metrics(list), FakeProvider()
    source.error = UnknownTemplate("chosen by a caller", [])
    with pytest.raises(SandboxError):
        async with Measured(source, metrics, "restore").acquire(MachineRequest("chosen by a caller")):
            pass
    text = metrics.text()
    assert value(text, "mcp_sandbox_failures_total", stage="restore", error="UnknownTemplate") == 1
    assert "chosen by a caller" not in text


async def test_an_error_of_the_caller_is_not_counted_as_a_failed_start():
    metrics = Metrics(list)
    with pytest.raises(RuntimeError):
        async with Measured(FakeProvider(), metrics, "acquire").acquire(REQUEST):
            raise RuntimeError
    assert value(metrics.text(), "mcp_sandbox_failures_total") is None


def test_pool_hits_misses_and_run_outcomes_are_counted():
    metrics = Metrics(list)
    metrics.pool_asked(TEMPLATE, hit=True)
    metrics.pool_asked(TEMPLATE, hit=True)
    metrics.pool_asked(TEMPLATE, hit=False)
    metrics.run_ended(TEMPLATE, "ok")
    text = metrics.text()
    assert value(text, "mcp_sandbox_pool_requests_total", outcome="hit") == 2
    assert value(text, "mcp_sandbox_pool_requests_total", outcome="miss") == 1
    assert value(text, "mcp_sandbox_runs_total", template=TEMPLATE, outcome="ok") == 1


def test_machines_are_counted_when_metrics_are_read():
    machines = [machine(MachineState.RUNNING), machine(MachineState.STARTING)]
    metrics = Metrics(lambda: machines)
    text = metrics.text()
    assert value(text, "mcp_sandbox_machines", state="running") == 1
    assert value(text, "mcp_sandbox_machines", state="starting") == 1
    assert value(text, "mcp_sandbox_machines", state="ending") == 0
    machines.clear()
    assert value(metrics.text(), "mcp_sandbox_machines") is None


async def test_every_running_machine_is_asked_for_its_memory(monkeypatch: pytest.MonkeyPatch):
    async def usage(_machine: object) -> Usage:
        return Usage(memory_bytes=5_000_000, private_bytes=0, cpu_s=0.0)

    monkeypatch.setattr(FakeMachine, "usage", usage)
    metrics = Metrics(list)
    source = Measured(Measured(FakeProvider(), metrics, "restore"), metrics, "acquire")
    async with source.acquire(REQUEST), source.acquire(REQUEST):
        await metrics.measure()
        assert value(metrics.text(), "mcp_sandbox_memory_bytes", template=TEMPLATE) == 10_000_000
    await metrics.measure()
    assert value(metrics.text(), "mcp_sandbox_memory_bytes") is None


@pytest.mark.parametrize("error", [MachineLost("its process has ended"), HostLost("a", "unreachable")])
async def test_a_machine_that_just_ended_counts_no_memory(monkeypatch: pytest.MonkeyPatch, error: Exception):
    async def ended(_machine: object) -> Usage:
        raise error

    monkeypatch.setattr(FakeMachine, "usage", ended)
    metrics = Metrics(list)
    async with Measured(FakeProvider(), metrics, "restore").acquire(REQUEST):
        await metrics.measure()
        assert value(metrics.text(), "mcp_sandbox_memory_bytes") is None


def test_metrics_of_several_servers_are_merged_with_a_server_label():
    one, two = Metrics(list), Metrics(list)
    one.run_ended(TEMPLATE, "ok")
    two.run_ended(TEMPLATE, "ok")
    two.took("restore", TEMPLATE, 0.2)
    text = merge({"1": one.text(), "2": two.text()})
    assert value(text, "mcp_sandbox_runs_total", server="1") == 1
    assert value(text, "mcp_sandbox_runs_total", server="2") == 1
    assert value(text, "mcp_sandbox_restore_seconds_bucket", server="2", le="0.2") == 1
    assert text.count("# TYPE mcp_sandbox_runs_total counter") == 1
    assert "_created" not in text


def test_without_servers_there_are_no_metrics():
    assert merge({}) == ""


class FakeTracer:
    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def start_as_current_span(self, name: str, attributes: dict[str, Any]) -> Iterator[None]:
        self.spans.append((name, attributes))
        yield


async def test_a_span_is_emitted_only_when_tracing_is_enabled(monkeypatch: pytest.MonkeyPatch):
    tracer, source = FakeTracer(), Measured(FakeProvider(), Metrics(list), "restore")
    async with source.acquire(REQUEST):
        pass
    monkeypatch.setattr(metrics_module, "_tracer", tracer)
    async with source.acquire(REQUEST):
        pass
    assert tracer.spans == [("restore", {"template": TEMPLATE})]


def test_tracing_without_its_package_logs_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    enable_tracing()
    assert "opentelemetry-api is not installed" in caplog.text
