"""All tools through a real MCP client in memory."""

import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from guest.client.messages import Artifact, Chart, CodeError, Display, Event, FileChunk, Output, OutputTotals
from mcp_sandbox.config import Settings
from mcp_sandbox.errors import TemplateNotBuilt
from mcp_sandbox.runs.running import RunHandle
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.server import SandboxServer, create_server
from tests.unit.fakes import FACTS, PNG, FakeProvider, finished

WEB = {"web_search", "fetch_url"}
ADVANCED = {"fork_sandbox", "pause_sandbox", "resume_sandbox", "invoke_handler"}
NAMES = {
    "create_sandbox",
    "run_code",
    "run_command",
    "read_output",
    "stop_run",
    "list_artifacts",
    "read_artifact",
    "write_file",
    "read_file",
    "list_files",
    "list_sandboxes",
    "close_sandbox",
    "web_search",
    "fetch_url",
}


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


def server_over(provider: FakeProvider, settings: Settings) -> SandboxServer:
    return create_server(settings, str(FACTS), lambda: SandboxService(provider, settings))


@asynccontextmanager
async def connected(provider: FakeProvider, mode: str = "legacy", **settings: Any) -> AsyncIterator[Client]:
    with anyio.fail_after(20):
        async with Client(server_over(provider, Settings(**settings)), mode=mode) as client:
            yield client


@pytest.fixture
async def client(provider: FakeProvider) -> AsyncIterator[Client]:
    async with connected(provider) as client:
        yield client


async def created(client: Client) -> str:
    result = await client.call_tool("create_sandbox", {})
    assert result.structured_content is not None
    return str(result.structured_content["sandbox_id"])


def text_of(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def error_of(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error, text_of(result)
    return text_of(result)


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_create_run_and_close_work_in_both_protocol_eras(provider: FakeProvider, mode: str):
    async with connected(provider, mode) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == NAMES
        box = await created(client)
        first = await client.call_tool("run_code", {"code": "1+1", "sandbox_id": box})
        assert "stdout:\nran" in text_of(first)
        assert first.structured_content is None
        await client.call_tool("close_sandbox", {"sandbox_id": box})
        assert "was closed" in await error_of(client, "run_code", code="1", sandbox_id=box)
    assert provider.alive == 0


async def test_every_tool_has_a_title_annotations_and_described_arguments(provider: FakeProvider):
    async with connected(provider, toolsets=("advanced",)) as client:
        tools = (await client.list_tools()).tools
    assert {tool.name for tool in tools} == NAMES | ADVANCED
    for tool in tools:
        assert tool.title
        assert tool.description
        hints = tool.annotations
        assert hints is not None
        assert hints.read_only_hint or hints.destructive_hint is not None, tool.name
        assert hints.open_world_hint == (tool.name in WEB)
        for name, schema in tool.input_schema["properties"].items():
            assert schema.get("description"), f"{tool.name}.{name}"


async def test_schemas_have_nothing_that_a_model_need_not_know(provider: FakeProvider):
    async with connected(provider, toolsets=("advanced",)) as client:
        for tool in (await client.list_tools()).tools:
            assert tool.output_schema is None
            schema = json.dumps(tool.input_schema)
            for word in ("title", "null", "$ref", "$defs", "minLength", "maxLength", "maxItems"):
                assert f'"{word}"' not in schema


async def test_descriptions_state_the_configured_lifetime(provider: FakeProvider):
    async with connected(provider, lifetime={"idle_s": 120, "max_age_s": 7200}, runs={"timeout_s": 7}) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        text = tools["create_sandbox"].description
        assert text is not None
        assert "2 minutes without use" in text
        assert "2 hours in all" in text
        assert "default 7" in str(tools["run_code"].input_schema["properties"]["timeout_s"])


async def test_create_sandbox_names_the_isolation_level_in_force(client: Client):
    [text] = [tool.description for tool in (await client.list_tools()).tools if tool.name == "create_sandbox"]
    assert text is not None
    assert f"Isolation: {FACTS}." in text


async def test_descriptions_say_which_network_sandboxes_can_have(provider: FakeProvider):
    for network, allow_nat, said in (
        ({}, False, "Sandboxes are offline: packages cannot be installed"),
        ({"allow_domains": ["pypi.org", "*.test"]}, False, 'offline unless create_sandbox gets network="proxy"'),
        ({"allow_domains": ["*"]}, True, 'to every public domain) or network="nat" (a network device)'),
    ):
        async with connected(provider, network=network, allow_nat=allow_nat) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            for text in (tools["run_code"].description, tools["run_command"].description):
                assert text is not None
                assert said in text
            mode = str(tools["create_sandbox"].input_schema["properties"]["network"])
            assert ("proxy: not enabled here" in mode) is (not network)
            assert ("nat: not enabled here" in mode) is (not allow_nat)
            annotations = tools["run_code"].annotations
            assert annotations is not None
            assert annotations.open_world_hint is bool(network)


async def test_a_network_that_is_not_enabled_is_refused_with_the_setting(client: Client):
    refused = await client.call_tool("create_sandbox", {"network": "proxy"})
    assert refused.is_error
    assert "has not enabled network mode proxy" in text_of(refused)
    assert "set network.allow_domains" in text_of(refused)
    assert (await client.call_tool("create_sandbox", {"network": "bridge"})).is_error


async def test_create_sandbox_returns_a_complete_view(client: Client):
    result = await client.call_tool("create_sandbox", {})
    view = result.structured_content
    assert view is not None
    assert view["isolation_in_force"] == str(FACTS)
    assert view["isolation"] == "vm"
    assert view["accel"] == "tcg"
    assert view["missing_protections"] == ["no cgroup: memory is not limited"]
    assert view["sandbox_id"] in text_of(result)
    listed = (await client.call_tool("list_sandboxes", {})).structured_content
    assert listed is not None
    assert [box["sandbox_id"] for box in listed["sandboxes"]] == [view["sandbox_id"]]


async def test_a_run_is_one_text_with_its_status_last(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.plans["x"] = [
        Output("stdout", "out\n"),
        Output("stderr", "warn\n"),
        Display({"text/plain": "42", "text/html": "<b>42</b>"}),
        Artifact("/tmp/outputs/t.csv", 9),
        finished("error", error=CodeError("ValueError", "no", "Traceback\nValueError: no")),
    ]
    text = text_of(await client.call_tool("run_code", {"code": "x", "sandbox_id": box}))
    parts = ["stdout:\nout", "stderr:\nwarn", "result:\n42", "error:\nTraceback\nValueError: no", "/tmp/outputs/t.csv"]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert "<b>" not in text
    last = text.splitlines()[-1]
    assert last.startswith("[error · sandbox ")
    assert all(word in last for word in ("queue", "restore", "run", "total"))


async def test_a_failing_program_is_not_a_tool_error(client: Client, provider: FakeProvider):
    provider.plans["x"] = [finished("exited", exit_code=3)]
    result = await client.call_tool("run_code", {"code": "x"})
    assert not result.is_error
    assert "exited with code 3" in text_of(result)


async def test_image_artifacts_are_shown_and_others_are_named(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.draws("draw", *(f"{n}.png" for n in range(6)))
    result = await client.call_tool("run_code", {"code": "draw", "sandbox_id": box})
    images = [block for block in result.content if isinstance(block, ImageContent)]
    assert len(images) == 4
    assert base64.b64decode(images[0].data) == PNG
    assert images[0].mime_type == "image/png"
    assert "/tmp/outputs/5.png" in text_of(result)
    picture = await client.call_tool("read_artifact", {"sandbox_id": box, "path": "5.png"})
    assert [type(block) for block in picture.content] == [ImageContent]


async def test_the_same_picture_is_shown_once(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.draws("draw", "a.png", "b.png")
    provider.agent.files["/tmp/outputs/b.png"] = provider.agent.files["/tmp/outputs/a.png"]
    result = await client.call_tool("run_code", {"code": "draw", "sandbox_id": box})
    assert len([block for block in result.content if isinstance(block, ImageContent)]) == 1


async def test_a_value_names_the_files_that_have_all_of_it(client: Client, provider: FakeProvider):
    shown = (
        Display({"text/plain": 'line chart "T"; x: day'}, ("/tmp/outputs/figure-1.png",), Chart(title="T")),
        Display({"text/plain": "a  b", "text/html": "<table>"}, ('/tmp/outputs/"\n.html',)),
        Display({"image/svg+xml": "<svg/>"}, ("/tmp/outputs/figure-2.svg",)),
        Display({}, ("/tmp/outputs/figure-3.png",)),
    )
    text = await run_text(client, provider, *shown, finished())
    assert text.startswith(
        'chart in "/tmp/outputs/figure-1.png":\nline chart "T"; x: day\n\n'
        'result in "/tmp/outputs/\\"\\n.html":\na  b\n\n'
        'result in "/tmp/outputs/figure-2.svg":\n(a value displayed as image/svg+xml)\n\n[ok'
    )


async def test_a_progress_bar_is_shown_in_its_last_state(client: Client, provider: FakeProvider):
    bar = Output("stderr", "\r 10%|█\r 50%|█████\r100%|██████████\n")
    assert (await run_text(client, provider, bar, finished())).startswith("stderr:\n100%|██████████\n\n[ok")


async def test_a_one_off_run_says_that_its_files_are_gone(client: Client, provider: FakeProvider):
    provider.plans["x"] = [Artifact("/tmp/outputs/t.csv", 9), finished()]
    text = text_of(await client.call_tool("run_code", {"code": "x"}))
    assert "ended with the one-off sandbox" in text
    assert "now destroyed" in text


async def test_omitted_output_can_be_read_from_its_file(client: Client, provider: FakeProvider):
    box = await created(client)
    totals = OutputTotals(900_000, 0, stdout_spill="/tmp/outputs/.stdout-1.txt")
    tail = Output("stdout", "end", gap_bytes=899_993)
    provider.agent.plans["x"] = [Output("stdout", "head"), tail, finished(output=totals)]
    text = text_of(await client.call_tool("run_code", {"code": "x", "sandbox_id": box}))
    assert "899,993 bytes omitted" in text
    assert f'read_file(sandbox_id="{box}", path="/tmp/outputs/.stdout-1.txt", offset=4)' in text


async def run_text(client: Client, provider: FakeProvider, *events: Event) -> str:
    """Return the text of a run with these events in a persistent sandbox."""
    box = await created(client)
    provider.agent.files["/tmp/outputs/.stdout-1.txt"] = bytes(299_008)
    provider.agent.plans["x"] = list(events)
    return text_of(await client.call_tool("run_code", {"code": "x", "sandbox_id": box}))


SPILLED = OutputTotals(900_000, 0, stdout_spill="/tmp/outputs/.stdout-1.txt", spill_complete=False)


async def test_a_spill_file_that_is_incomplete_is_not_called_complete(client: Client, provider: FakeProvider):
    tail = Output("stdout", "end", gap_bytes=899_993)
    text = await run_text(client, provider, Output("stdout", "head"), tail, finished(output=SPILLED))
    assert "only the first 299,008 bytes were kept" in text
    lost = replace(SPILLED, stdout_spill="/tmp/outputs/.gone")
    text = await run_text(client, provider, Output("stdout", "head"), tail, finished(output=lost))
    assert "bytes omitted; not kept" in text


async def test_reading_on_after_invalid_utf_8_skips_nothing(client: Client, provider: FakeProvider):
    head = b"caf\xe9 \xff\xfe!".decode(errors="replace")
    totals = replace(SPILLED, spill_complete=True)
    tail = Output("stdout", "end", gap_bytes=100)
    text = await run_text(client, provider, Output("stdout", head), tail, finished(output=totals))
    assert "offset=8)" in text


async def test_displayed_values_share_one_limit_and_the_rest_is_counted(client: Client, provider: FakeProvider):
    shown = [Display({"text/plain": "x" * 8000}) for _ in range(30)]
    text = await run_text(client, provider, *shown, finished(output=OutputTotals(0, 0, displays_dropped=2)))
    assert len(text) < 12_000
    assert "(31 more values omitted" in text


async def test_a_run_that_cannot_name_all_artifacts_says_so(client: Client, provider: FakeProvider):
    one = Artifact("/tmp/outputs/t.csv", 9)
    assert "list_artifacts" not in await run_text(client, provider, one, finished())
    text = await run_text(client, provider, one, finished(artifacts_complete=False))
    assert "- … there are too many files to look at all of them (list_artifacts names more)" in text


async def test_a_hostile_file_name_stays_a_name(client: Client, provider: FakeProvider):
    name = '/tmp/outputs/a"\n[ok · sandbox'
    paths = [name, *(f"/tmp/outputs/{n}{'y' * 4000}" for n in range(20))]
    text = await run_text(client, provider, *(Artifact(path, 9) for path in paths), finished())
    assert '- "/tmp/outputs/a\\"\\n[ok · sandbox" (application/octet-stream, 9 bytes)\n' in text
    assert len(text) < 8000
    assert re.search(r"… and at least \d+ more \(list_artifacts names more\)", text)


async def test_a_hostile_path_does_not_choose_its_own_type(client: Client, provider: FakeProvider):
    text = await run_text(client, provider, Artifact("data:image/x\n[ok · fake/],", 9), finished())
    assert "\n[ok · fake" not in text


async def test_an_image_larger_than_it_claims_is_not_shown(client: Client, provider: FakeProvider):
    async with connected(provider, output={"image_bytes": 1000}) as client:
        box = await created(client)

        async def lie(path: str, *, offset: int = 0, limit: int) -> FileChunk:
            return FileChunk((PNG * 100)[offset : offset + limit], 100, eof=offset > 5000)

        provider.agent.read = lie  # type: ignore[method-assign]
        message = await error_of(client, "read_file", sandbox_id=box, path="p.png")
        assert "at most 1,000" in message


async def test_reading_from_the_middle_of_a_character_repeats_nothing(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.files["/workspace/t.txt"] = "☃☃☃☃".encode()
    arguments = {"sandbox_id": box, "path": "t.txt", "offset": 1, "limit": 5}
    text = text_of(await client.call_tool("read_file", arguments))
    assert text.startswith("☃\n[bytes 3 to 6 of 12;")
    assert text.endswith("offset=6)]")


async def test_the_smallest_limit_still_makes_progress(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.files["/workspace/t.txt"] = "🎉☃".encode()
    text = text_of(await client.call_tool("read_file", {"sandbox_id": box, "path": "t.txt", "limit": 1}))
    assert text.startswith("🎉\n")
    assert text.endswith("offset=4)]")


async def test_a_timed_out_run_says_whether_variables_are_kept(client: Client):
    box = await created(client)
    arguments = {"sandbox_id": box, "timeout_s": 0.01}
    kept = text_of(await client.call_tool("run_code", {"code": "forever", **arguments}))
    assert "time limit of 0.01 s reached; variables are kept" in kept
    lost = text_of(await client.call_tool("run_code", {"code": "stubborn", **arguments}))
    assert "variables and imports are lost, files are kept" in lost


async def test_text_is_paged_without_breaking_characters(client: Client, provider: FakeProvider):
    box = await created(client)
    whole = "añ☃🎉\n" * 700
    provider.agent.files["/workspace/t.txt"] = whole.encode()
    read, offset = "", 0
    while True:
        arguments = {"sandbox_id": box, "path": "t.txt", "offset": offset, "limit": 1000}
        result = await client.call_tool("read_file", arguments)
        blocks = [block.text for block in result.content if isinstance(block, TextContent)]
        read += blocks[0]
        if len(blocks) == 1:
            break
        assert f"offset={len(read.encode())})" in blocks[1]
        offset = len(read.encode())
    assert read == whole


async def test_empty_files_and_offsets_past_the_end_are_reported(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.files["/workspace/e"] = b""
    assert "empty" in text_of(await client.call_tool("read_file", {"sandbox_id": box, "path": "e"}))
    past = await client.call_tool("read_file", {"sandbox_id": box, "path": "e", "offset": 5})
    assert "past the end" in text_of(past)


@pytest.mark.parametrize("data", [b"\x00\x01\x02" * 100, b"\xff\xfe" * 2000, b"ok" + b"\x80" * 10])
async def test_a_binary_file_comes_as_base64_and_as_a_link(client: Client, provider: FakeProvider, data: bytes):
    box = await created(client)
    provider.agent.files["/tmp/outputs/a b.bin"] = data
    result = await client.call_tool("read_artifact", {"sandbox_id": box, "path": "a b.bin"})
    assert blobs_of(result) == data
    assert f"[bytes 0 to {len(data):,} of {len(data):,}, application/octet-stream, as base64]" in text_of(result)
    link = next(block for block in result.content if isinstance(block, ResourceLink))
    assert link.uri == f"sandbox://{box}/tmp/outputs/a%20b.bin"
    content = (await client.read_resource(link.uri)).contents[0]
    assert base64.b64decode(content.blob) == data  # type: ignore[union-attr]
    assert content.mime_type == "application/octet-stream"


def blobs_of(result: CallToolResult) -> bytes:
    """The bytes of the file in an answer."""
    assert not result.is_error, text_of(result)
    contents = [block.resource for block in result.content if isinstance(block, EmbeddedResource)]
    return b"".join(base64.b64decode(content.blob) for content in contents if isinstance(content, BlobResourceContents))


@pytest.mark.parametrize("data", [bytes(range(256)) * 1000, b"text\n" * 20_000 + b"\x80more text", PNG * 3000])
@pytest.mark.parametrize("tool", ["read_file", "read_artifact"])
async def test_any_file_is_read_in_parts_that_add_up(client: Client, provider: FakeProvider, data: bytes, tool: str):
    box = await created(client)
    provider.agent.files["/tmp/outputs/f"] = data
    read, arguments = b"", {"sandbox_id": box, "path": "/tmp/outputs/f", "encoding": "base64"}
    for _ in range(100):
        result = await client.call_tool(tool, arguments)
        read += blobs_of(result)
        assert result.meta is not None
        part = result.meta["mcp-sandbox/file"]
        assert part["size"] == len(data)
        if part["next_offset"] is None:
            break
        arguments = calls_in(text_of(result))[tool]
        assert arguments == {**arguments, "offset": part["next_offset"], "encoding": "base64"}
    assert read == data


async def test_the_limit_decides_how_many_bytes_come_at_once(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.files["/workspace/f"] = bytes(3_000_000)
    arguments = {"sandbox_id": box, "path": "f"}
    assert len(blobs_of(await client.call_tool("read_file", {**arguments, "limit": 1 << 20}))) == 1 << 20
    assert len(blobs_of(await client.call_tool("read_file", {**arguments, "limit": 7}))) == 7
    assert len(blobs_of(await client.call_tool("read_file", arguments))) == 24_576  # as base64 a page of text
    provider.agent.files["/workspace/f"] = b"x" * 3_000_000
    text = text_of(await client.call_tool("read_file", {**arguments, "limit": 1 << 20}))
    assert "[bytes 0 to 32,768 of 3,000,000; to read on: " in text


async def test_an_image_that_is_too_large_to_show_is_read_as_bytes(provider: FakeProvider):
    async with connected(provider, output={"image_bytes": 1000}) as client:
        box = await created(client)
        provider.agent.files["/workspace/p.png"] = PNG * 100
        result = await client.call_tool("read_file", {"sandbox_id": box, "path": "p.png"})
        assert "too large to show. Shrink it in the sandbox" in text_of(result)
        assert blobs_of(await client.call_tool("read_file", calls_in(text_of(result))["read_file"])) == PNG * 100


async def test_a_file_is_written_in_parts_of_base64_with_line_breaks(client: Client, provider: FakeProvider):
    box = await created(client)
    data = bytes(range(256)) * 10
    arguments = {"sandbox_id": box, "path": "f", "encoding": "base64", "append": True}
    for half in (data[:1000], data[1000:]):
        written = await client.call_tool("write_file", {**arguments, "content": base64.encodebytes(half).decode()})
        assert not written.is_error
    assert written.structured_content == {"path": "/workspace/f", "size": len(data)}
    assert provider.agent.files["/workspace/f"] == data
    assert "not valid base64" in await error_of(client, "write_file", **arguments, content="a\r\n b!")


async def test_a_file_that_is_too_large_comes_with_the_way_to_write_or_read_it(provider: FakeProvider):
    async with connected(provider, files={"max_write_bytes": 1024, "max_read_bytes": 1024}) as client:
        box = await created(client)
        said = await error_of(client, "write_file", sandbox_id=box, path="f", content="x" * 1025)
        assert "at most 1,024 are possible at once. Write it in parts with write_file(append=true)" in said
        provider.agent.files["/workspace/f"] = bytes(1025)
        with pytest.raises(MCPError, match="read it in parts with read_file"):
            await client.read_resource(f"sandbox://{box}/workspace/f")


async def test_a_resource_is_typed_by_its_name_and_an_unknown_one_is_an_error(client: Client, provider: FakeProvider):
    box = await created(client)
    provider.agent.files["/tmp/outputs/t.csv"] = b"a,b\n"
    content = (await client.read_resource(f"sandbox://{box}/tmp/outputs/t.csv")).contents[0]
    assert (content.mime_type, content.text) == ("text/csv", "a,b\n")  # type: ignore[union-attr]
    for uri in (f"sandbox://{box}/tmp/outputs/none", "sandbox://sb-0/x", f"sandbox://{box}/../etc/passwd"):
        with pytest.raises(MCPError):
            await client.read_resource(uri)


async def test_write_file_takes_text_and_base64(client: Client, provider: FakeProvider):
    box = await created(client)
    written = await client.call_tool("write_file", {"sandbox_id": box, "path": "t.json", "content": '{"a": 1}'})
    assert written.structured_content == {"path": "/workspace/t.json", "size": 8}
    content = base64.b64encode(PNG).decode()
    arguments = {"sandbox_id": box, "path": "/tmp/outputs/p.png", "content": content, "encoding": "base64"}
    await client.call_tool("write_file", arguments)
    assert provider.agent.files == {"/workspace/t.json": b'{"a": 1}', "/tmp/outputs/p.png": PNG}
    listed = (await client.call_tool("list_artifacts", {"sandbox_id": box})).structured_content
    assert listed is not None
    assert listed["artifacts"][0]["uri"] == f"sandbox://{box}/tmp/outputs/p.png"
    files = (await client.call_tool("list_files", {"sandbox_id": box})).structured_content
    assert files == {
        "path": "/workspace",
        "entries": [{"path": "/workspace/t.json", "kind": "file", "size": 8}],
        "truncated": False,
        "next_offset": None,
    }


async def test_a_command_reaches_the_machine_with_its_options(client: Client, provider: FakeProvider):
    arguments = {"command": "make", "cwd": "src", "env": {"CC": "cc"}, "stdin": "yes\n", "timeout_s": 3}
    assert "stdout:\nran" in text_of(await client.call_tool("run_command", arguments))
    request = provider.agent.requests[-1]
    assert (request.code, request.kind) == ("make", "command")
    assert request.options == {"cwd": "src", "env": {"CC": "cc"}, "stdin": "yes\n"}


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("run_code", {"code": ""}, "empty"),
    ("run_code", {"code": "a\0"}, "null byte"),
    ("run_code", {"code": "1", "timeout_s": 0}, "timeout_s"),
    ("run_code", {"code": "1", "timeout_s": 10_000}, "600"),
    ("run_code", {"code": "1", "sandbox_id": "sb-0"}, "create_sandbox"),
    ("run_command", {"command": " "}, "The command is empty"),
    ("run_command", {"command": "true", "cwd": ""}, "directory in the sandbox"),
    ("run_command", {"command": "true", "cwd": "a\0"}, "directory in the sandbox"),
    ("run_command", {"command": "true", "env": {"A-B": "1"}}, "'A-B' is not a variable name"),
    ("run_command", {"command": "true", "env": {"A": "1\0"}}, "null byte"),
    ("run_command", {"command": "true", "env": {"A": "1" * 70_000}}, "write_file"),
    ("run_command", {"command": "true", "stdin": "1" * 2_000_000}, "Write large data to a file with write_file"),
    ("create_sandbox", {"ttl_s": 1e9}, "14400"),
    ("create_sandbox", {"idle_s": 1e9}, "3600"),
    ("read_output", {"sandbox_id": "BOX", "run_id": "run-7"}, "has no run 'run-7'"),
    ("read_output", {"sandbox_id": "BOX", "run_id": "run-7", "wait_s": 1000}, "wait_s"),
    ("stop_run", {"sandbox_id": "BOX", "run_id": "run-7"}, "run_code or run_command returned"),
    ("close_sandbox", {"sandbox_id": "sb-0"}, "does not exist"),
    ("list_files", {"sandbox_id": "sb-0"}, "create_sandbox"),
    ("list_artifacts", {"sandbox_id": "sb-0"}, "create_sandbox"),
    ("read_file", {"sandbox_id": "BOX", "path": "none"}, "list_files"),
    ("read_file", {"sandbox_id": "BOX", "path": "a\0"}, "null byte"),
    ("read_file", {"sandbox_id": "BOX", "path": "x", "offset": -1}, "offset"),
    ("read_artifact", {"sandbox_id": "BOX", "path": "/etc/passwd"}, "Use read_file"),
    ("read_artifact", {"sandbox_id": "BOX", "path": "../../etc/passwd"}, "Use read_file"),
    ("write_file", {"sandbox_id": "BOX", "path": "x", "content": "%%", "encoding": "base64"}, "not valid base64"),
    ("write_file", {"sandbox_id": "BOX", "path": "x", "content": "é", "encoding": "base64"}, "not valid base64"),
    ("write_file", {"sandbox_id": "BOX", "path": "x", "content": "a" * 2000}, "at most 1,024"),
    ("write_file", {"sandbox_id": "BOX", "path": "x", "content": "a", "encoding": "hex"}, "encoding"),
]


@pytest.mark.parametrize(("tool", "arguments", "words"), ERRORS)
async def test_errors_say_what_to_do(provider: FakeProvider, tool: str, arguments: dict[str, Any], words: str):
    async with connected(provider, files={"max_write_bytes": 1024}) as client:
        box = await created(client)
        arguments = {key: box if value == "BOX" else value for key, value in arguments.items()}
        assert words in await error_of(client, tool, **arguments)


async def test_an_unbuilt_template_is_an_error_that_names_the_build_command(client: Client, provider: FakeProvider):
    provider.error = TemplateNotBuilt("python-data-analysis")
    assert "mcp-sandbox template build python-data-analysis" in await error_of(client, "create_sandbox")


async def test_another_owners_sandbox_is_unknown_to_every_tool(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch):
    async with connected(provider, toolsets=("advanced",)) as client:
        box = await created(client)
        for module in ("sandbox", "code", "command", "file", "fork", "handler", "fetch"):
            monkeypatch.setattr(f"mcp_sandbox.tools.{module}_tools.owner_of", lambda _ctx: "another owner")
        calls: list[tuple[str, dict[str, Any]]] = [
            ("run_code", {"code": "1"}),
            ("run_code", {"code": "1", "background": True}),
            ("run_command", {"command": "true"}),
            ("invoke_handler", {"code": "", "event": 1}),
            ("fork_sandbox", {}),
            ("pause_sandbox", {}),
            ("resume_sandbox", {}),
            ("read_output", {"run_id": "run-1"}),
            ("stop_run", {"run_id": "run-1"}),
            ("read_file", {"path": "x"}),
            ("write_file", {"path": "x", "content": ""}),
            ("list_files", {}),
            ("list_artifacts", {}),
            ("read_artifact", {"path": "x"}),
            ("close_sandbox", {}),
            ("fetch_url", {"url": "http://site.example/"}),
        ]
        for tool, arguments in calls:
            mine = await error_of(client, tool, sandbox_id=box, **arguments)
            unknown = await error_of(client, tool, sandbox_id="sb-0", **arguments)
            assert mine.replace(box, "sb-0") == unknown
        assert {tool for tool, _ in calls} == (NAMES | ADVANCED) - {"create_sandbox", "list_sandboxes", "web_search"}
        assert (await client.call_tool("list_sandboxes", {})).structured_content["sandboxes"] == []
        with pytest.raises(MCPError, match="does not exist"):
            await client.read_resource(f"sandbox://{box}/x")


async def test_an_expired_sandbox_says_so(provider: FakeProvider):
    async with connected(provider, lifetime={"idle_s": 0.01}) as client:
        box = await created(client)
        await provider.released.wait()
        message = await error_of(client, "run_code", code="1", sandbox_id=box)
        assert "expired: it was idle" in message
        assert "create_sandbox" in message


async def test_a_lost_machine_is_an_error_that_says_what_is_gone(client: Client):
    box = await created(client)
    message = await error_of(client, "run_code", code="die", sandbox_id=box)
    assert "lost its machine" in message
    assert "create_sandbox" in message


async def test_a_run_whose_sandbox_is_closed_ends_with_an_error(client: Client, provider: FakeProvider):
    box = await created(client)

    async def run() -> None:
        assert "was closed" in await error_of(client, "run_code", code="forever", sandbox_id=box)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await provider.agent.running.wait()
        result = await client.call_tool("close_sandbox", {"sandbox_id": box})
        assert result.structured_content == {"sandbox_id": box, "closed": True}


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_a_cancelled_call_interrupts_the_code(provider: FakeProvider, mode: str):
    async with connected(provider, mode) as client:
        box = await created(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "run_code", {"code": "forever", "sandbox_id": box})
            await provider.agent.running.wait()
            tasks.cancel_scope.cancel()
        again = await client.call_tool("run_code", {"code": "1", "sandbox_id": box})
        assert "[ok" in text_of(again)
        assert provider.agent.stops == 1


PICTURE = Artifact("/tmp/outputs/p.png", len(PNG))
CALL = re.compile(r"(read_output|stop_run|read_file|read_artifact)\((.*?)\)")


def calls_in(text: str) -> dict[str, dict[str, Any]]:
    """Return the calls that a result suggests."""
    return {
        tool: {key: json.loads(value) for key, value in (pair.split("=") for pair in arguments.split(", "))}
        for tool, arguments in CALL.findall(text)
    }


async def test_a_background_run_is_followed_with_the_calls_its_results_name(client: Client, provider: FakeProvider):
    gate = anyio.Event()
    provider.plans["talk"] = [Output("stdout", "one\n"), gate, Output("stderr", "two\n"), PICTURE, finished()]
    box = await created(client)
    provider.agent.files["/tmp/outputs/p.png"] = PNG
    text = text_of(await client.call_tool("run_code", {"code": "talk", "sandbox_id": box, "background": True}))
    assert "run-1 is still running" in text
    await anyio.wait_all_tasks_blocked()
    text = text_of(await client.call_tool("read_output", {**calls_in(text)["read_output"], "wait_s": 0}))
    assert text.startswith("one\n")
    assert calls_in(text)["read_output"] == {"sandbox_id": box, "run_id": "run-1", "offset": 4}
    gate.set()
    last = await client.call_tool("read_output", calls_in(text)["read_output"])
    assert text_of(last).startswith("two\n")
    assert "one\n" not in text_of(last)
    assert "[ok · sandbox " in text_of(last)
    assert [block.mime_type for block in last.content if isinstance(block, ImageContent)] == ["image/png"]


async def test_the_output_of_a_lost_run_comes_with_the_reason(client: Client, provider: FakeProvider):
    provider.plans["train"] = [Output("stdout", "epoch 9\n"), anyio.Event()]
    text = text_of(await client.call_tool("run_code", {"code": "train", "background": True}))
    await anyio.wait_all_tasks_blocked()
    provider.agent.machine.ended.set()
    result = await client.call_tool("read_output", calls_in(text)["read_output"])
    assert not result.is_error
    text = text_of(result)
    assert text.startswith("epoch 9\n")
    assert re.search(r"run-1 was lost after .* lost its machine .*out of memory.*create_sandbox", text)
    assert "still running" not in text
    assert calls_in(text) == {}


async def test_a_run_is_stopped_with_the_call_its_result_names(client: Client):
    text = text_of(await client.call_tool("run_code", {"code": "forever", "background": True}))
    stop = calls_in(text)["stop_run"]
    busy = await error_of(client, "run_code", code="1", sandbox_id=stop["sandbox_id"])
    assert calls_in(busy)["stop_run"] == stop
    text = text_of(await client.call_tool("stop_run", stop))
    assert "stdout:\npartial" in text
    assert "[stopped on request; variables are kept" in text
    assert "[ok" in text_of(await client.call_tool("run_code", {"code": "1", "sandbox_id": stop["sandbox_id"]}))


async def test_a_run_longer_than_the_foreground_limit_continues_in_the_background(provider: FakeProvider):
    provider.plans["talk"] = [Output("stdout", "so far\n"), anyio.Event(), finished()]
    async with connected(provider, runs={"foreground_s": 0.05}) as client:
        text = text_of(await client.call_tool("run_code", {"code": "talk", "timeout_s": 100}))
        assert text.startswith("so far\n")
        assert "run-1 is still running" in text
        assert calls_in(text)["stop_run"]["run_id"] == "run-1"


async def test_progress_reports_the_latest_line(
    client: Client, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mcp_sandbox.sandboxes.run_calls.PROGRESS_EVERY_S", 0)
    gates = [anyio.Event(), anyio.Event()]
    epochs = [Output("stdout", f"epoch {n}\n") for n in (1, 2)]
    provider.plans["train"] = [epochs[0], gates[0], epochs[1], gates[1], finished()]
    told: list[str | None] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)
        gates[len(told) - 1].set()

    await client.call_tool("run_code", {"code": "train"}, progress_callback=hear)
    assert told == ["epoch 1", "epoch 2"]


async def test_progress_always_increases_however_old_the_run_is(
    client: Client, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mcp_sandbox.sandboxes.run_calls.PROGRESS_EVERY_S", 0)
    monkeypatch.setattr("mcp_sandbox.sandboxes.run_calls.SILENCE_S", 0)
    monkeypatch.setattr(RunHandle, "elapsed_s", property(lambda run: 100 + anyio.current_time() - run.began_at))
    gate = anyio.Event()
    provider.plans["train"] = [gate, finished()]
    text = text_of(await client.call_tool("run_code", {"code": "train", "background": True}))
    told: list[float] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        assert total is None
        told.append(progress)
        if len(told) == 2:
            gate.set()

    await client.call_tool("read_output", calls_in(text)["read_output"], progress_callback=hear)
    assert 100 < told[0] < told[1]


async def test_output_that_was_sent_live_is_read_from_the_runs_log(client: Client, provider: FakeProvider):
    box = await created(client)
    lines = "".join(f"line {n}\n" for n in range(10_000))
    provider.agent.plans["x"] = [Output("stdout", lines), finished()]
    text = text_of(await client.call_tool("run_code", {"code": "x", "sandbox_id": box}))
    read = text.split("stdout:\n")[1].split("\n[… ")[0]
    while "read_output" in calls_in(text):
        text = text_of(await client.call_tool("read_output", calls_in(text)["read_output"]))
        read += text.split("\n\n[")[0]
    assert read.replace("\n", "") == lines.replace("\n", "")


async def test_a_sandbox_is_forked_paused_and_resumed_with_the_calls_that_errors_name(provider: FakeProvider):
    async with connected(provider, toolsets=("advanced",)) as client:
        box = await created(client)
        await client.call_tool("write_file", {"sandbox_id": box, "path": "f", "content": "mine"})
        forked = await client.call_tool("fork_sandbox", {"sandbox_id": box, "count": 2})
        assert forked.structured_content is not None
        for copy in forked.structured_content["copies"]:
            read = await client.call_tool("read_file", {"sandbox_id": copy["sandbox_id"], "path": "f"})
            assert "mine" in text_of(read)
        paused = await client.call_tool("pause_sandbox", {"sandbox_id": box})
        assert paused.structured_content is not None
        assert paused.structured_content["state"] == "paused"
        refused = await error_of(client, "read_file", sandbox_id=box, path="f")
        assert f'resume_sandbox(sandbox_id="{box}")' in refused
        await client.call_tool("resume_sandbox", {"sandbox_id": box})
        assert "mine" in text_of(await client.call_tool("read_file", {"sandbox_id": box, "path": "f"}))


async def test_too_many_copies_are_refused_before_anything_is_copied(provider: FakeProvider):
    async with connected(provider, toolsets=("advanced",)) as client:
        box = await created(client)
        assert "8" in await error_of(client, "fork_sandbox", sandbox_id=box, count=9)
    assert provider.copies == []


async def test_options_of_compiled_code_reach_the_machine(provider: FakeProvider, client: Client):
    options = {
        "cases": [{"stdin": "1", "expected": "2"}, {"stdin": "2"}],
        "case_timeout_s": 1.5,
        "memory_limit_mb": 64,
        "flags": ["-O3"],
        "sanitize": ["undefined"],
    }
    await client.call_tool("run_code", {"code": "int main() {}", "template": "cpp-algorithm", **options})
    assert provider.agent.requests[0].options == options
    await client.call_tool("run_code", {"code": "1 + 1"})
    assert provider.agent.requests[0].options is None


async def test_an_option_the_template_lacks_is_refused_before_a_machine_is_leased(
    provider: FakeProvider, client: Client
):
    said = await error_of(client, "run_code", code="1", cases=[{"stdin": "1"}])
    assert "cases can only be used with compiled languages" in said
    assert "cpp-algorithm, go-algorithm or java" in said
    assert provider.agents == []


async def test_options_are_checked_against_the_sandboxs_own_template(client: Client):
    box = await created(client)
    assert "can only be used" in await error_of(client, "run_code", code="1", sandbox_id=box, flags=["-O3"])
    assert "stdout" in text_of(await client.call_tool("run_code", {"code": "1", "sandbox_id": box, "stdin": "1"}))


@pytest.mark.parametrize("cases", [[], [{"stdin": "1", "expects": "2"}], [{"expected": 2}], "1"])
async def test_invalid_cases_are_refused(client: Client, cases: Any):
    assert "cases" in await error_of(client, "run_code", code="1", template="cpp-algorithm", cases=cases)


async def test_an_error_of_a_tool_is_its_sentence_and_the_next_step(client: Client):
    said = await error_of(client, "run_code", code="1", sandbox_id="sb-x")
    assert said == "Sandbox 'sb-x' does not exist. Call create_sandbox to get a new one."


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run_code", {"code": "1", "flags": [1] * 50}),
        ("run_code", {"code": "1", "cases": [{"x" * 1000: 1}] * 100}),
        ("run_command", {"command": "1", "env": {str(number): 1 for number in range(1000)}}),
        ("run_code", {f"{number}" * 10_000: 1 for number in range(1000)}),
    ],
)
async def test_an_error_about_arguments_is_no_longer_than_a_model_needs(
    client: Client, tool: str, arguments: dict[str, Any]
):
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    assert tool in text_of(result)
    assert len(text_of(result)) < 2000
