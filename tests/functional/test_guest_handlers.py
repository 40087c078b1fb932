"""Handlers in the Python kernel, with an agent that runs natively."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from guest.client import AgentClient
from guest.client.messages import RunCode
from guest.client.reports import HandlerReport
from tests.functional.guest_harness import Result, agent_client
from tests.waiting import HANG_S

pytestmark = pytest.mark.anyio

LIMIT_S = HANG_S
MB = 2**20


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def machine(anyio_backend: str) -> AsyncIterator[AgentClient]:
    """One agent for all tests of this file."""
    async with agent_client() as client:
        yield client


async def invoke(machine: AgentClient, code: str, event: object = None, **options: Any) -> Result:
    asked = {"handler": "handler", "event": event, "context": {}, "timeout_s": 30, "memory_mb": 512, **options}
    with anyio.fail_after(LIMIT_S):
        async with machine.run(RunCode(code, kind="invoke", options=asked)) as events:
            return Result([event async for event in events])


def report_of(result: Result) -> HandlerReport:
    (report,) = [event for event in result.events if isinstance(event, HandlerReport)]
    return report


def given(result: Result) -> object:
    """Return the handler's result."""
    assert result.finished.status == "ok", result.finished
    report = report_of(result)
    assert report.result is not None
    assert report.result_bytes == len(report.result.encode())
    return json.loads(report.result)


@pytest.mark.parametrize("event", [None, True, 0.5, "ä\n", [1, [2]], {"key": {"deep": ["er"]}}])
async def test_a_handler_gets_an_event_and_returns_a_result_as_json(machine, event):
    assert given(await invoke(machine, "def handler(event, context): return [event, None]", event)) == [event, None]


async def test_a_handler_can_print_and_display(machine):
    code = "import sys\ndef handler(e, c):\n    print('out'); print('err', file=sys.stderr); display('seen')\n'last'"
    result = await invoke(machine, code)
    assert (result.stdout, result.stderr, result.shown) == ("out\n", "err\n", ["'last'", "'seen'"])
    assert given(result) is None


async def test_an_asynchronous_handler_is_awaited(machine):
    code = "import asyncio\nasync def handler(event, context):\n    await asyncio.sleep(0)\n    return event + 1"
    assert given(await invoke(machine, code, 41)) == 42


async def test_a_handler_of_an_earlier_run_is_called_without_code_and_keeps_its_state(machine):
    await invoke(
        machine, "calls = []\ndef count(event, context): calls.append(event); return calls", 1, handler="count"
    )
    assert given(await invoke(machine, "", 2, handler="count")) == [1, 2]


async def test_the_context_has_facts_of_the_machine_and_of_the_caller(machine):
    code = """def who(event, context):
    left = context.get_remaining_time_in_millis()
    return [context.function_name, context.memory_limit_in_mb, 0 < left <= 20_000, context.tenant, context.nested]"""
    options = {"handler": "who", "timeout_s": 20, "context": {"tenant": "acme", "nested": {"a": 1}}}
    assert given(await invoke(machine, code, **options)) == ["who", 512, True, "acme", {"a": 1}]


async def test_every_call_has_its_own_id(machine):
    code = "def handler(event, context): return context.aws_request_id"
    assert len({given(await invoke(machine, code)) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("handler = 3", "TypeError", "'handler' is of type int"),
        ("def handler(e, c): return {1, 2}", "TypeError", "the result of handler is not JSON: Object of type set"),
        ("def handler(e, c): return float('nan')", "TypeError", "not JSON: Out of range float"),
        ("def handler(e, c):\n    e = []; e.append(e); return e", "TypeError", "not JSON: Circular"),
        ("def handler(e, c): raise KeyError('gone')", "KeyError", "'gone'"),
        ("def handler(event): pass", "TypeError", "takes 1 positional argument but 2 were given"),
        ("1/0", "ZeroDivisionError", "division by zero"),
    ],
)
async def test_an_error_is_a_result_with_the_users_traceback(machine, code, name, message):
    result = await invoke(machine, code)
    error = result.finished.error
    assert error is not None
    assert (result.finished.status, result.finished.state, error.name) == ("error", "kept", name)
    assert message in error.message
    assert "guest/" not in error.traceback
    if "raise" in code:
        assert "def handler(e, c): raise KeyError('gone')" in error.traceback
        assert report_of(result).result is None


async def test_a_missing_handler_is_an_error_and_not_measured(machine):
    result = await invoke(machine, "", handler="nobody")
    assert result.finished.error is not None
    assert "def nobody(event, context)" in result.finished.error.message
    assert not [event for event in result.events if isinstance(event, HandlerReport)]


async def test_a_large_result_is_cut_and_complete_in_an_artifact(machine):
    result = await invoke(machine, "def handler(e, c): return 'ä' * 100_000")
    report = report_of(result)
    assert report.result is not None
    assert report.result_bytes == 200_002
    assert len(report.result.encode()) <= 16 * 1024
    assert report.result_file is not None
    assert json.loads((await machine.read(report.result_file, limit=MB)).data) == "ä" * 100_000
    assert report.result_file in [getattr(event, "path", None) for event in result.events]


async def test_a_call_is_measured_without_the_code_before_it_and_with_its_children(machine):
    burn = "sum(range(5_000_000))"
    code = f"""import subprocess, sys
{burn}
def handler(event, context):
    subprocess.run([sys.executable, '-c', '{burn}'], check=True)"""
    end = report_of(await invoke(machine, code)).end
    assert 0 < end.cpu_ms <= 1000 * LIMIT_S
    assert end.wall_ms > 0
    idle = report_of(await invoke(machine, f"{burn}\ndef handler(event, context): pass")).end
    assert idle.cpu_ms < end.cpu_ms


async def test_the_peak_of_a_call_is_not_that_of_an_earlier_call(machine):
    code = "def handler(megabytes, context): return len(bytearray(megabytes * 2**20))"
    big, small = [report_of(await invoke(machine, code, size)) for size in (200, 20)]
    assert big.least_peak_bytes > 200 * MB
    assert small.least_peak_bytes < big.least_peak_bytes - 100 * MB
    for report in (big, small):
        assert report.end.peak_bytes is not None
        assert report.end.peak_bytes >= report.least_peak_bytes


async def test_a_handler_that_does_not_end_is_stopped_and_its_call_measured(machine):
    asked = {"handler": "handler", "event": 1, "context": {}, "timeout_s": 30, "memory_mb": 512}
    code = "def handler(event, context):\n    print('on', flush=True)\n    while True: pass"
    with anyio.fail_after(LIMIT_S):
        async with machine.run(RunCode(code, kind="invoke", options=asked)) as events:
            seen = [await anext(events)]
            await events.stop()
            result = Result([*seen, *[event async for event in events]])
    assert (result.finished.status, result.finished.state) == ("interrupted", "kept")
    assert report_of(result).result is None


async def test_unreadable_options_are_an_error_of_the_run(machine):
    with anyio.fail_after(LIMIT_S):
        async with machine.run(RunCode("x = 1", kind="invoke", options={})) as events:
            result = Result([event async for event in events])
    assert result.finished.status == "error"
