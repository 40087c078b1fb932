"""Whatever bytes a client posts, MCP and REST answer, never with a failure of the server, and in few words."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.rest.next_steps import ROOT
from mcp_sandbox.serving.messages import InvalidMessage, parse_message
from tests.unit.fakes import FakeProvider
from tests.unit.fuzzing import fuzzed
from tests.unit.http_harness import Http, serving_http
from tests.unit.json_values import JSON, changed
from tests.unit.test_http_messages import HEADERS, META

MAX_ERROR_CHARS = 5000  # a path has up to 4,095
MESSAGES: list[dict[str, Any]] = [
    {"jsonrpc": "2.0", "id": 7, "method": method, "params": {**params, "_meta": META}}
    for method, params in {
        "tools/call": {"name": "run_code", "arguments": {"code": "1", "timeout_s": 5}},
        "tools/list": {},
        "server/discover": {},
        "initialize": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "a", "version": "0"},
        },
    }.items()
]
RUNS: list[dict[str, Any]] = [
    {"code": "1", "timeout_s": 5.0, "background": False, "cases": [{"stdin": "1", "expected": "1"}]},
    {"kind": "command", "command": "ls", "cwd": "/tmp", "env": {"A": "1"}},
    {"kind": "invoke", "code": "1", "event": {"a": [1]}, "context": {}, "handler": "handler"},
]
SANDBOX: dict[str, Any] = {"template": None, "ttl_s": 60.0, "idle_s": 60.0, "network": "none", "allow_domains": ["a.b"]}
REST = {"/sandboxes": [SANDBOX], "/runs": RUNS, "/sandboxes/sb-0123456789abcdef/fork": [{"count": 2}]}


@pytest.fixture(scope="module")
def http() -> Iterator[Http]:
    with serving_http(FakeProvider()) as http:
        yield http


@st.composite
def bodies(draw: st.DrawFn, honest: list[dict[str, Any]]) -> bytes:
    """Return an honest body, one with parts replaced, one with damaged bytes, or any bytes."""
    content = draw(st.sampled_from(honest) | st.sampled_from(honest).flatmap(changed) | JSON | st.floats())
    body = bytearray(json.dumps(content).encode())
    for place in draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[place] = draw(st.integers(0, 255))
    return draw(st.just(bytes(body)) | st.just(bytes(body)) | st.binary(max_size=100))


def refusal_on_stdio(body: bytes) -> str | None:
    """Return the answer to what is no message."""
    try:
        parse_message(body)
    except InvalidMessage as invalid:
        return invalid.answer
    return None


@fuzzed
@given(body=bodies(MESSAGES), era=st.sampled_from(sorted(HEADERS)))
def test_mcp_answers_any_body(http: Http, body: bytes, era: str):
    answer = http.post("/mcp", body, HEADERS[era])
    assert answer.status_code < 500
    if (refusal := refusal_on_stdio(body)) is not None:
        assert (answer.status_code, answer.text) == (400, refusal)
    if answer.is_error:
        assert len(answer.text) < MAX_ERROR_CHARS


@fuzzed
@given(data=st.data())
def test_rest_answers_any_body(http: Http, data: st.DataObject):
    path = data.draw(st.sampled_from(sorted(REST)))
    answer = http.post(ROOT + path, data.draw(bodies(REST[path])))
    if answer.status_code == 201 and path == "/sandboxes":
        assert http.delete(f"{ROOT}/sandboxes/{answer.json()['sandbox_id']}").status_code == 200
    if answer.is_error:
        assert answer.status_code in (400, 403, 404, 409, 422, 429, 503), answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert len(answer.text) < MAX_ERROR_CHARS
