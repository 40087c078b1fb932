"""invoke_handler through a real MCP client in memory, and the report of a service that has ended."""

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp_types import CallToolResult, TextContent

from guest.client.messages import CodeError, Output
from guest.client.reports import HandlerReport, ProcessEnd
from guest.protocol import encode_json
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest
from mcp_sandbox.runs.requests import HANDLER_LIMITS_BYTES, HandlerRun
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.server import create_server
from templates.catalogue import Catalogue
from tests.unit.fakes import FACTS, TEMPLATE, FakeProvider, finished

MB = 2**20
CODE = "def handler(event, context): return event"


def report(result: str | None, **changes: Any) -> HandlerReport:
    end = ProcessEnd(exit_code=None, signal=None, wall_ms=1234, cpu_ms=56, peak_bytes=90 * MB)
    size = len((result or "").encode())
    return replace(HandlerReport(result, size, None, end, least_peak_bytes=90 * MB), **changes)


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def client(provider: FakeProvider) -> AsyncIterator[Client]:
    settings = Settings(toolsets=("advanced",))
    server = create_server(settings, str(FACTS), lambda: SandboxService(provider, settings))
    with anyio.fail_after(20):
        async with Client(server) as client:
            yield client


def text_of(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def invoke(client: Client, code: str = CODE, event: object = None, **arguments: Any) -> str:
    result = await client.call_tool("invoke_handler", {"code": code, "event": event, **arguments})
    assert not result.is_error, text_of(result)
    return text_of(result)


async def refusal(client: Client, **arguments: Any) -> str:
    result = await client.call_tool("invoke_handler", {"code": CODE, "event": None, **arguments})
    assert result.is_error
    return text_of(result)


async def created(client: Client) -> str:
    result = await client.call_tool("create_sandbox", {})
    assert result.structured_content is not None
    return str(result.structured_content["sandbox_id"])


async def test_the_result_comes_first_then_the_output_then_the_usage(client: Client, provider: FakeProvider):
    provider.plans[CODE] = [Output("stdout", "working\n"), report('{"a": 1}'), finished()]
    first, printed, took, status = (await invoke(client)).split("\n\n")
    assert first == 'result:\n{"a": 1}'
    assert printed == "stdout:\nworking"
    assert took == "handler: 1,234 ms, CPU 56 ms, peak memory 90 MB"
    assert status.startswith("[ok · one-off sandbox")


async def test_the_machine_receives_the_event_the_context_and_the_limits(client: Client, provider: FakeProvider):
    await invoke(client, CODE, {"n": [1]}, context={"tenant": "acme"}, timeout_s=7)
    (request,) = provider.agent.requests
    assert request.kind == "invoke"
    assert request.options == {
        "handler": "handler",
        "event": {"n": [1]},
        "context": {"tenant": "acme"},
        "timeout_s": 7.0,
        "memory_mb": Catalogue().load(TEMPLATE).machine.memory_mb,
    }


async def test_a_handler_of_an_earlier_run_is_called_with_empty_code(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.plans[""] = [report("7"), finished()]
    assert (await invoke(client, "", sandbox_id=box)).startswith("result:\n7\n")


async def test_a_handler_that_raises_shows_its_traceback_and_usage(client: Client, provider: FakeProvider):
    error = CodeError("KeyError", "'x'", "Traceback …\nKeyError: 'x'")
    provider.plans[CODE] = [report(None), finished("error", error=error)]
    text = await invoke(client)
    assert text.startswith("error:\nTraceback …\nKeyError: 'x'\n\nhandler: 1,234 ms")
    assert "result" not in text


async def test_an_inexact_peak_is_shown_as_a_range(client: Client, provider: FakeProvider):
    provider.plans[CODE] = [report("1", least_peak_bytes=20 * MB), finished()]
    assert "peak memory 20 to 90 MB" in await invoke(client)


@pytest.mark.parametrize(
    ("kept", "file", "how"),
    [
        (
            True,
            "/tmp/outputs/run-1-result.json",
            'read_artifact(sandbox_id="{}", path="/tmp/outputs/run-1-result.json")',
        ),
        (False, "/tmp/outputs/run-1-result.json", "lost with the one-off sandbox"),
        (True, None, "there was no room"),
    ],
)
async def test_a_result_that_is_cut_says_where_the_rest_is(
    client: Client, provider: FakeProvider, kept: bool, file: str | None, how: str
):
    provider.plans[CODE] = [report("[1, 2", result_bytes=50_000, result_file=file), finished()]
    box = {"sandbox_id": await created(client)} if kept else {}
    text = await invoke(client, **box)
    assert text.startswith("result:\n[1, 2\n[… cut; the whole JSON has 50,000 bytes: ")
    assert how.format(*box.values()) in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"code": " "}, "sandbox where an earlier run defined it"),
        ({"handler": "app.handler"}, "name of a function"),
        ({"event": "x" * 1_048_576}, "1,048,576 bytes together. Write large data to a file"),
        ({"timeout_s": 1e6}, "timeout_s"),
        ({"sandbox_id": "sb-none"}, "create_sandbox"),
    ],
)
async def test_an_impossible_request_is_an_error_with_advice(
    client: Client, provider: FakeProvider, arguments: dict[str, Any], words: str
):
    assert words in await refusal(client, **arguments)
    assert provider.agents == []


async def test_an_event_that_is_not_json_is_refused(provider: FakeProvider):
    async with SandboxService(provider, Settings()) as service:
        for event in (math.nan, {1, 2}, object()):
            request = HandlerRun("me", CODE, event=event)
            with pytest.raises(BadRequest, match="must be JSON"):
                await service.run(request)


def test_only_python_has_handlers():
    template = Catalogue().load(TEMPLATE).model_copy(update={"name": "fast", "language": "cpp"})
    with pytest.raises(BadRequest, match="Only Python has handlers, and template 'fast' is for cpp"):
        HandlerRun("me", CODE, event=1).check_template(template)


def test_the_added_limits_fit_the_reserved_size():
    run = HandlerRun("me", CODE, event=1)
    message = run.guest_options(Catalogue().load(TEMPLATE), 1 / 3)
    assert 0 < len(encode_json(message)) - len(encode_json(run.options())) < HANDLER_LIMITS_BYTES


async def test_every_result_reports_a_service_that_has_ended(client: Client, provider: FakeProvider):
    provider.plans["1"] = [replace(finished(), service_loss="exit code 1; its last output: no disk")]
    result = text_of(await client.call_tool("run_code", {"code": "1"}))
    assert (
        "service has ended (exit code 1; its last output: no disk). Call create_sandbox to get one that runs." in result
    )
