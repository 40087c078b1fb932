"""Messages over HTTP: what is no message gets the error that it gets on stdio, in both eras of the protocol."""

import json
from collections.abc import Iterator

import pytest
from mcp_types import INVALID_REQUEST, PARSE_ERROR

from guest.client.messages import Output
from tests.unit.fakes import FakeProvider, finished
from tests.unit.http_harness import Http, serving_http
from tests.unit.test_stdio import INVALID, UNREADABLE

STATELESS = "2026-07-28"
HEADERS = {
    "2025-11-25": {"MCP-Protocol-Version": "2025-11-25"},
    STATELESS: {"MCP-Protocol-Version": STATELESS, "Mcp-Method": "tools/call", "Mcp-Name": "run_code"},
}
META = {"io.modelcontextprotocol/protocolVersion": STATELESS, "io.modelcontextprotocol/clientCapabilities": {}}


@pytest.fixture(scope="module")
def http() -> Iterator[Http]:
    provider = FakeProvider()
    provider.plans["half ?"] = [Output("stdout", "a question mark\n"), finished()]
    with serving_http(provider) as http:
        yield http


@pytest.mark.parametrize("era", HEADERS)
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_json_is_a_parse_error(http: Http, name: str, era: str):
    answer = http.post("/mcp", UNREADABLE[name], HEADERS[era])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, PARSE_ERROR)
    assert (answer.json()["id"] == 7) is UNREADABLE[name].startswith(b'{"jsonrpc": "2.0", "id": 7,')


@pytest.mark.parametrize("era", HEADERS)
@pytest.mark.parametrize("name", INVALID)
def test_json_that_is_no_request_is_an_invalid_request(http: Http, name: str, era: str):
    body, number = INVALID[name]
    answer = http.post("/mcp", body, HEADERS[era])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, INVALID_REQUEST)
    assert answer.json()["id"] == number


@pytest.mark.parametrize("era", HEADERS)
def test_an_invalid_answer_of_the_client_is_refused_without_an_error_that_has_its_id(http: Http, era: str):
    answer = http.post("/mcp", b'{"jsonrpc":"2.0","id":{},"result":{}}', HEADERS[era])
    assert (answer.status_code, answer.content) == (400, b"")


def test_an_unpaired_surrogate_arrives_as_a_question_mark(http: Http):
    params = {"name": "run_code", "arguments": {"code": "HALF"}, "_meta": META}
    request = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    answer = http.post("/mcp", json.dumps(request).encode().replace(b"HALF", rb"half \ud800"), HEADERS[STATELESS])
    assert answer.status_code == 200
    assert "a question mark" in answer.json()["result"]["content"][0]["text"]
