"""The protocol's own test programs against the product's HTTP wiring."""

import re
import subprocess

import anyio
import pytest
from mcp.shared.exceptions import MCPDeprecationWarning

from mcp_sandbox.config import Settings
from mcp_sandbox.serving.server import SandboxServer
from tests.functional import conformance_content, conformance_questions, conformance_tasks
from tests.functional.http_fake import serving_fakes
from tests.functional.node_tools import node_tool
from tests.unit.fakes import FakeProvider
from tests.waiting import BUILD_S, HANG_S
from vmm.process import find_tool

pytestmark = pytest.mark.skipif(find_tool("npm") is None, reason="needs npm")

SUMMARY = re.compile(r"^([✓✗]) (\S+): ", re.MULTILINE)
FAILED = re.compile(r"^  - (\w+): ", re.MULTILINE)
NOT_SCORED = re.compile(r"^  [✓✗] (\S+) \(", re.MULTILINE)


def add_fixtures(server: SandboxServer) -> None:
    conformance_content.register(server)
    conformance_questions.register(server)


async def output_of(command: list[str]) -> tuple[int, str]:
    with anyio.fail_after(HANG_S):
        ended = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
    return ended.returncode, ended.stdout.decode()


# The fixtures log and ask for samples, which 2026-07-28 deprecates and 2025-11-25 requires.
@pytest.mark.filterwarnings(f"ignore::{MCPDeprecationWarning.__module__}.{MCPDeprecationWarning.__qualname__}")
@pytest.mark.parametrize(("revision", "required"), [("2025-11-25", 30), ("2026-07-28", 37)])
async def test_every_required_scenario_passes(revision: str, required: int):
    with anyio.fail_after(BUILD_S):
        suite = await node_tool("@modelcontextprotocol/conformance", "dist/index.js")
    async with serving_fakes(FakeProvider(), add_fixtures) as address:
        status, output = await output_of([*suite, "server", "--url", address, "--requirements", revision])
    results = {name: mark for mark, name in SUMMARY.findall(output)}
    scored = {name: mark for name, mark in results.items() if name not in NOT_SCORED.findall(output)}
    assert [name for name, mark in scored.items() if mark != "✓"] == [], output
    assert len(scored) == required
    assert status == 0, output


async def test_the_inspector_finds_no_fault_with_the_tools():
    with anyio.fail_after(BUILD_S):
        inspector = await node_tool("@modelcontextprotocol/inspector", "clients/launcher/build/index.js")
    settings = Settings(toolsets=("advanced",), serve={"port": 0})
    async with serving_fakes(FakeProvider(), settings=settings) as address:
        status, output = await output_of([*inspector, "--cli", address, "--method", "tools/list", "--strict"])
    assert "invoke_handler" in output
    assert status == 0, output


@pytest.mark.parametrize(
    ("scenario", "checks", "failing"),
    [
        ("tasks-capability-negotiation", 5, []),
        ("tasks-request-headers", 5, []),
        ("tasks-wire-fields", 4, []),
        ("tasks-lifecycle", 9, ["TasksProtocolErrorFailedShape"]),  # no run of ours ends in a JSON-RPC error
    ],
)
async def test_background_runs_are_tasks_as_the_extension_has_them(scenario: str, checks: int, failing: list[str]):
    provider = FakeProvider()
    with anyio.fail_after(BUILD_S):
        suite = await node_tool("@modelcontextprotocol/conformance", "dist/index.js")
    async with serving_fakes(provider, lambda server: conformance_tasks.register(server, provider)) as address:
        _, output = await output_of([*suite, "server", "--url", address, "--scenario", scenario])
    assert FAILED.findall(output) == failing, output
    assert f"Passed: {checks - len(failing)}/{checks}, " in output, output
