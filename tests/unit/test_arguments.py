"""Arguments through a real MCP client: text stays text, and a wrong argument is explained in one line."""

from typing import Any

import pytest
from mcp.client import Client

from tests.unit.fakes import FakeProvider
from tests.unit.test_tools import client, connected, created, error_of, provider, text_of

__all__ = ["client", "provider"]  # fixtures

JSON_TEXTS = ["[1, 2, 3]", '{"a": 1}', "null", "true", "1", '"x"', "[" * 2000, ""]


@pytest.mark.parametrize("text", JSON_TEXTS)
async def test_text_that_looks_like_json_arrives_as_it_is(client: Client, provider: FakeProvider, text: str):
    for tool, argument in (("run_code", "code"), ("run_command", "command")):
        box = await created(client)
        result = await client.call_tool(tool, {argument: "x", "stdin": text, "sandbox_id": box})
        assert not result.is_error, text_of(result)
        [agent] = [agent for agent in provider.agents if agent.requests]
        assert (agent.requests.pop().options or {}).get("stdin") == text


@pytest.mark.parametrize("text", ["null", "[1]", "{}"])
async def test_an_id_or_name_that_looks_like_json_is_only_an_unknown_one(
    client: Client, provider: FakeProvider, text: str
):
    assert f"Sandbox {text!r} does not exist" in await error_of(client, "run_code", code="1", sandbox_id=text)
    assert f"no template {text!r}" in await error_of(client, "run_command", command="ls", template=text)
    assert not provider.agents


async def test_lists_and_objects_that_a_client_sends_as_strings_are_read(client: Client, provider: FakeProvider):
    arguments = {"command": "ls", "env": '{"A": "[1]"}', "timeout_s": "5"}
    assert not (await client.call_tool("run_command", arguments)).is_error
    assert provider.agent.requests[0].options == {"env": {"A": "[1]"}}


@pytest.mark.parametrize(
    ("tool", "arguments", "problem"),
    [
        ("run_code", {}, "code is missing; it takes text"),
        (
            "run_code",
            {"code": "1", "timeout_s": -1},
            "timeout_s takes a number, more than 0 and at most 600, but got -1",
        ),
        ("run_code", {"code": ["1"]}, "code takes text, but got a list of 1"),
        (
            "run_code",
            {"code": "1", "cases": [{"expect": "2"}]},
            "cases.0.expect does not exist (did you mean expected?)",
        ),
        (
            "run_code",
            {"code": "1", "cases": "x"},
            'cases takes a list of 1 to 100 items, each an object with stdin, expected, but got "x"',
        ),
        ("run_code", {"code": "1", "sandbox_id": ""}, 'sandbox_id takes text of 1 to 64 characters, but got ""'),
        ("run_command", {"command": "x", "env": {"A": 1}}, "env.A takes text, but got 1"),
        ("create_sandbox", {"network": "bridge"}, 'network takes one of none, proxy, nat, but got "bridge"'),
        ("create_sandbox", {"template": None}, "template takes text of 1 to 63 characters, but got null"),
        ("list_files", {"sandbox_id": "x", "recursive": "deep"}, 'recursive takes true or false, but got "deep"'),
        (
            "read_file",
            {"sandbox_id": "x", "path": "x", "offset": -1},
            "offset takes a whole number, at least 0, but got -1",
        ),
    ],
)
async def test_an_invalid_argument_is_one_line_with_what_it_got_and_what_it_takes(
    client: Client, provider: FakeProvider, tool: str, arguments: dict[str, Any], problem: str
):
    assert await error_of(client, tool, **arguments) == f"{tool} got invalid arguments: {problem}."
    assert not provider.agents  # no machine was started


@pytest.mark.parametrize(
    ("tool", "wrong", "right"),
    [
        ("run_code", "timeout", "timeout_s"),
        ("run_code", "timeout_seconds", "timeout_s"),
        ("run_code", "timeoutSeconds", "timeout_s"),
        ("run_code", "input", "stdin"),
        ("run_code", "source", "code"),
        ("run_code", "language", "template"),
        ("run_code", "sandboxId", "sandbox_id"),
        ("run_code", "tests", "cases"),
        ("run_command", "cmd", "command"),
        ("run_command", "working_dir", "cwd"),
        ("run_command", "environment", "env"),
        ("read_output", "timeout", "wait_s"),
        ("write_file", "text", "content"),
        ("write_file", "filename", "path"),
        ("web_search", "limit", "max_results"),
    ],
)
async def test_an_unknown_argument_is_refused_with_the_name_that_is_meant(
    client: Client, provider: FakeProvider, tool: str, wrong: str, right: str
):
    said = await error_of(client, tool, **{wrong: "x"})
    assert said.startswith(f"{tool} has no argument {wrong!r} (did you mean {right}?). Its arguments: ")
    assert not provider.agents


async def test_an_unknown_tool_is_refused_with_the_tools_there_are(client: Client):
    said = await error_of(client, "runcode", code="1")
    assert said.startswith("Unknown tool: runcode (did you mean run_code?). Tools: create_sandbox, ")
    assert len(await error_of(client, "x" * 100_000)) < 1000


async def test_null_is_accepted_for_whatever_can_be_left_out(provider: FakeProvider):
    async with connected(provider) as client:
        left_out = dict.fromkeys(("sandbox_id", "template", "timeout_s", "stdin", "cases", "flags"))
        assert "stdout:\nran" in text_of(await client.call_tool("run_code", {"code": "1", **left_out}))
