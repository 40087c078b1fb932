"""Whatever arguments a client gives a tool, it gets a result or an error that says what is wrong, of bounded length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio.from_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.client import Client
from mcp_types import CallToolResult

from mcp_sandbox.config import Settings
from tests.unit.fakes import FakeProvider
from tests.unit.fuzzing import fuzzed
from tests.unit.json_values import JSON
from tests.unit.test_tools import server_over

SETTINGS = Settings(
    toolsets=("advanced",),
    limits={"sandboxes": 3, "queue_timeout_s": 0.01},
    host_dirs=("data=/usr/share", "none=/nonexistent:rw"),
)
MAX_ERROR_CHARS = 5000  # a path has up to 4,095
# Values that get past the first checks, by the name of the argument.
LIKELY: dict[str, list[object]] = {
    "code": ["1", "\ud800", "x" * 2_000_000],
    "command": ["ls"],
    "template": ["cpp-algorithm", "python-data-analysis"],
    "run_id": ["run-1", "run-" + "9" * 60, "run-²"],
    "path": ["a", "/tmp/outputs/a", "/" * 4095, "\ud800"],
    "offset": [0, 2**31 - 1, 2**63 - 1, 2**64],
    "timeout_s": [1, 1e-300, float("nan"), float("inf")],
    "flags": [["-O3"], ["-"] * 100_000, [1] * 100_000, ["-o"]],
    "sanitize": [["address"], ["thread"] * 100_000],
    "cases": [[{"stdin": "1"}], [{}] * 101, [1] * 100_000],
    "env": [{"A": "1"}, {str(number): 0 for number in range(10_000)}],
    "count": [1, 8],
    "handler": ["handler", "a b"],
    "content": ["x", "\ud800"],
    "encoding": ["text", "base64", "auto"],
    "limit": [1, 1 << 20, 2**64],
    "source": ["data/none", "data/../x", "none/x", "data/\0", "data/\ud800"],
    "target": ["none/x", "data/x", "none"],
}


class Server:
    """A server in another thread, with a sandbox in which a run has ended."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, client: Client) -> None:
        self._portal, self._client = portal, client
        self.arguments = {
            tool.name: list(tool.input_schema["properties"]) for tool in portal.call(client.list_tools).tools
        }
        self.renew()

    def renew(self) -> None:
        created = self.call("create_sandbox", {}).structured_content
        assert created is not None
        self.box = created["sandbox_id"]
        self.call("run_code", {"code": "1", "sandbox_id": self.box, "background": True})

    def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        result = self._portal.call(self._client.call_tool, tool, arguments)
        assert isinstance(result, CallToolResult)
        return result


@contextmanager
def serving() -> Iterator[Server]:
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(server_over(FakeProvider(), SETTINGS))) as client,
    ):
        yield Server(portal, client)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@fuzzed
@given(data=st.data())
def test_a_tool_answers_any_arguments(server: Server, data: st.DataObject):
    tool = data.draw(st.sampled_from(sorted(server.arguments)))
    names = data.draw(st.sets(st.sampled_from(server.arguments[tool] or ["none"])))
    arguments: dict[str, Any] = {}
    for name in sorted(names):
        likely = [server.box] if name == "sandbox_id" else LIKELY.get(name, [True, False])
        arguments[name] = data.draw(st.sampled_from(likely) | JSON)
    if data.draw(st.booleans()):
        arguments |= data.draw(st.dictionaries(st.text(max_size=100), JSON, max_size=3))
    result = server.call(tool, arguments)
    text = "".join(getattr(block, "text", "") for block in result.content)
    assert len(text) <= 2 * SETTINGS.output.page_bytes
    if result.is_error:
        assert text != f"Error executing tool {tool}", "an error that the tool does not know"
        assert len(text) < MAX_ERROR_CHARS
    if server.call("list_files", {"sandbox_id": server.box}).is_error:  # it was closed or paused
        server.call("close_sandbox", {"sandbox_id": server.box})
        server.renew()
