"""Listings come in pages: however much code leaves in a sandbox, an answer stays short and says how to go on."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp.client import Client
from mcp_types import CallToolResult

from mcp_sandbox.config import Settings
from mcp_sandbox.sandboxes.view import contents_of
from mcp_sandbox.tools.sandbox_tools import MAX_TEMPLATES_CHARS, _described
from templates.catalogue import Catalogue
from tests.unit.fakes import TEMPLATE, FakeProvider
from tests.unit.test_tools import connected, created

PAGE = Settings().output.page_bytes
NAMES = ["x" * 200, "\x01" * 80, "é" * 100, '"\\' * 50]


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
async def client(provider: FakeProvider) -> AsyncIterator[Client]:
    async with connected(provider, limits={"sandboxes": 100}) as client:
        yield client


async def pages(client: Client, tool: str, member: str, **arguments: object) -> list[list[dict[str, Any]]]:
    """Follow `next_offset` to the end; every page fits, as text and as structured content."""
    found: list[list[dict[str, Any]]] = []
    offset: int | None = 0
    while offset is not None:
        result = await client.call_tool(tool, {**arguments, "offset": offset})
        assert isinstance(result, CallToolResult)
        content = result.structured_content
        assert content is not None
        for text in (result.content[0].text, json.dumps(content, ensure_ascii=False)):  # type: ignore[union-attr]
            assert len(text.encode()) <= PAGE + 500
        assert content[member], "every page gets on"
        found.append(content[member])
        offset = content["next_offset"]
        assert content.get("truncated", offset is not None) is (offset is not None)
    return found


@pytest.mark.parametrize(
    ("tool", "member", "where"),
    [("list_artifacts", "artifacts", "/tmp/outputs"), ("list_files", "entries", "/workspace")],
)
async def test_all_files_can_be_listed_page_by_page(
    client: Client, provider: FakeProvider, tool: str, member: str, where: str
):
    box = await created(client)
    provider.agent.files = {f"{where}/{number:04}{NAMES[number % 4]}": b"" for number in range(700)}
    listed = await pages(client, tool, member, sandbox_id=box)
    assert len(listed) > 3
    assert [entry["path"] for page in listed for entry in page] == sorted(provider.agent.files)


async def test_a_name_that_fills_a_page_is_listed(provider: FakeProvider):
    async with connected(provider, output={"page_bytes": 1024}) as client:
        box = await created(client)
        provider.agent.files = {f"/workspace/{letter * 2000}": b"" for letter in "abc"}
        offset, seen = 0, []
        while offset is not None:
            arguments = {"sandbox_id": box, "offset": offset}
            content = (await client.call_tool("list_files", arguments)).structured_content
            assert content is not None
            seen += [entry["path"][11] for entry in content["entries"]]
            offset = content["next_offset"]
    assert seen == ["a", "b", "c"]


async def test_sandboxes_are_listed_page_by_page(client: Client):
    boxes = [await created(client) for _ in range(60)]
    listed = await pages(client, "list_sandboxes", "sandboxes")
    assert len(listed) > 1
    assert [entry["sandbox_id"] for page in listed for entry in page] == boxes


def test_a_description_names_only_the_first_of_many_templates():
    template = Catalogue().load(TEMPLATE)
    assert _described({TEMPLATE: template}) == f"{TEMPLATE}: {contents_of(template)} ({template.machine.memory_mb} MB)"
    many = _described({f"template-{number}": template for number in range(1000)})
    assert len(many) < MAX_TEMPLATES_CHARS + 2000
    assert "more, which `mcp-sandbox template list` shows" in many
