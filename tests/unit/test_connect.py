"""The parts of `mcp-sandbox --connect` that need no server."""

import io
import json
import os
import socket
from email.message import EmailMessage
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, cast

import pytest

from mcp_sandbox.connect.link import BadAddress, Event, Link, events_in
from mcp_sandbox.connect.messages import VERSION_KEY, answers, parse, refusal
from mcp_sandbox.connect.relay import Relay
from mcp_sandbox.start import connect_url

if TYPE_CHECKING:
    from http.client import HTTPResponse


def stateless(method: str, **params: object) -> bytes:
    meta = {VERSION_KEY: "2026-07-28"}
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}).encode()


@pytest.mark.parametrize(
    ("arguments", "variable", "found"),
    [
        (["--connect", "http://a"], "", "http://a"),
        (["--connect=http://a"], "http://b", "http://a"),
        ([], "http://b", "http://b"),
        ([], "", None),
        (["doctor"], "http://b", None),
        (["--home", "/h", "--connect", "http://a"], "", None),  # left to the command line
    ],
)
def test_a_client_that_only_connects_starts_without_the_command_line(
    arguments: list[str], variable: str, found: str | None
):
    assert connect_url(arguments, {"MCP_SANDBOX_CONNECT": variable}) == found


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:8000", "ftp://a/mcp", "http://", "http://a:b", "http://a:99999", "http://[::1"]
)
def test_only_http_addresses_are_taken(address: str):
    with pytest.raises(BadAddress):
        Link(address, None)


def test_an_ipv6_address_needs_no_port():
    assert (Link("http://[::1]/mcp", None)._host, Link("http://[::1]/mcp", None)._port) == ("::1", 80)


def test_a_token_may_end_with_a_newline_and_has_no_odd_characters():
    assert Link("http://a", "secret\n")._headers["Authorization"] == "Bearer secret"
    with pytest.raises(BadAddress, match="token"):
        Link("http://a", "a\nb")


class OddLink:
    """A server whose connections are as http.client leaves them."""

    url = "http://a"

    def send(self, _method: str, headers: dict[str, str], _body: bytes) -> None:
        raise ValueError(f"Invalid header value in {sorted(headers)}")


def relayed(*lines: bytes) -> tuple[Relay, list[dict[str, Any]]]:
    """A relay that took these lines, and what it wrote."""
    reading, writing = os.pipe()
    relay = Relay(cast("Link", OddLink()), writing)
    relay.run(lines)
    os.close(writing)
    with os.fdopen(reading) as written:
        return relay, [json.loads(line) for line in written]


def test_a_message_that_fits_into_no_header_is_answered_and_the_relay_goes_on():
    odd = stateless("tools/call", name="\ud800")
    _, written = relayed(odd, stateless("a\nb"))
    assert [(answer["id"], answer["error"]["code"]) for answer in written] == [(1, -32600), (1, -32600)]


def test_a_request_whose_connection_has_just_ended_can_be_cancelled():
    relay, _ = relayed()
    connection = HTTPConnection("a")
    with socket.socket() as connection.sock:  # not connected any more
        relay._open[1] = connection
        cancelled = stateless("notifications/cancelled", requestId=1)
        assert relay._abandon(parse(cancelled))


class EmptyResponse:
    """A response without a body."""

    status = 200
    headers = EmailMessage()

    def read(self) -> bytes:
        return b""


def test_an_empty_answer_to_initialize_is_an_error_for_the_client():
    reading, writing = os.pipe()
    relay = Relay(cast("Link", OddLink()), writing)
    greeting = parse(b'{"jsonrpc": "2.0", "id": 5, "method": "initialize"}')
    relay._open_session(greeting, cast("HTTPResponse", EmptyResponse()))
    os.close(writing)
    with os.fdopen(reading) as written:
        assert json.loads(written.read())["id"] == 5


def test_a_stateless_request_repeats_its_method_and_name_in_headers():
    assert parse(stateless("tools/call", name="run_code")).headers == {
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/call",
        "Mcp-Name": "run_code",
    }
    assert parse(stateless("tasks/get", taskId="task")).headers["Mcp-Name"] == "task"
    assert "Mcp-Name" not in parse(stateless("tools/list")).headers


@pytest.mark.parametrize("name", ["ü", " a", "a\nb", "=?base64?YQ==?="])
def test_a_name_that_is_no_header_value_is_encoded(name: str):
    value = parse(stateless("resources/read", uri=name)).headers["Mcp-Name"]
    assert value.startswith("=?base64?")
    assert value.isascii()


def test_a_request_of_a_session_has_no_headers_of_its_own():
    assert parse(b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}').headers == {}


def test_events_have_their_ids_and_their_data():
    text = b": ping\r\n\r\nid: 1\r\ndata: \r\n\r\nid: 2\r\nevent: message\r\ndata: {}\r\n\r\ndata: a\ndata: b\n\n"
    response = cast("HTTPResponse", io.BytesIO(text))
    assert list(events_in(response)) == [Event("1", b""), Event("2", b"{}"), Event(None, b"a\nb")]


@pytest.mark.parametrize(
    ("message", "is_answer"),
    [
        (b'{"id": 1, "result": {}}', True),
        (b'{"id": 1, "error": {}}', True),
        (b'{"id": 2, "result": {}}', False),
        (b'{"id": 1, "method": "ping"}', False),
    ],
)
def test_only_the_answer_ends_a_request(message: bytes, is_answer: bool):
    assert answers(message, 1) is is_answer


def test_a_servers_own_error_is_passed_on_with_the_id_of_the_request():
    body = b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32600, "message": "Session not found"}}'
    assert json.loads(refusal(7, 404, body)) == {
        "jsonrpc": "2.0",
        "id": 7,
        "error": {"code": -32600, "message": "Session not found"},
    }


@pytest.mark.parametrize(("body", "words"), [(b'{"title": "Too many requests."}', "Too many"), (b"<html>", "502")])
def test_any_other_refusal_becomes_an_error(body: bytes, words: str):
    assert words in json.loads(refusal(7, 502, body))["error"]["message"]
