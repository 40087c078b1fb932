"""What the conformance suite expects a server to have: tools, resources and prompts by exact names and words.

`conformance list --server` names the scenarios; the description of each says what it calls.
"""

import base64
import json
from typing import Any

import anyio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts.base import Message, UserMessage
from mcp_types import (
    AudioContent,
    CallToolResult,
    Completion,
    ContentBlock,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    SetLevelRequestParams,
    SubscribeRequestParams,
    TextContent,
    TextResourceContents,
    UnsubscribeRequestParams,
)

from mcp_sandbox.serving.server import SandboxServer

STEP_S = 0.05  # between messages of one call, as the scenarios ask
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(16)).decode()
WAV = base64.b64encode(b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(16)).decode()

AnyContext = Context[Any, Any]


def text(words: str) -> TextContent:
    return TextContent(type="text", text=words)


def image() -> ImageContent:
    return ImageContent(type="image", data=PNG, mime_type="image/png")


def embedded(uri: str, words: str, mime_type: str = "text/plain") -> EmbeddedResource:
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, mime_type=mime_type, text=words))


def answer(*blocks: ContentBlock) -> CallToolResult:
    return CallToolResult(content=list(blocks))


def register(server: SandboxServer) -> None:
    """Add everything of this module to a server."""
    _add_content_tools(server)
    _add_tools_that_report(server)
    _add_tools_that_change_lists(server)
    _add_resources(server)
    _add_prompts(server)
    _add_legacy_methods(server)


def _add_content_tools(server: SandboxServer) -> None:
    mixed = embedded("test://mixed-content-resource", '{"test":"data","value":123}', "application/json")
    contents: dict[str, tuple[ContentBlock, ...]] = {
        "test_simple_text": (text("This is a simple text response for testing."),),
        "test_image_content": (image(),),
        "test_audio_content": (AudioContent(type="audio", data=WAV, mime_type="audio/wav"),),
        "test_embedded_resource": (embedded("test://embedded-resource", "This is an embedded resource content."),),
        "test_multiple_content_types": (text("Multiple content types test:"), image(), mixed),
    }

    def add(tool: str, result: CallToolResult) -> None:
        server.add_tool(lambda: result, name=tool, description="Returns fixed content.", structured_output=False)

    for name, blocks in contents.items():
        add(name, answer(*blocks))

    @server.tool(description="Always fails.")
    def test_error_handling() -> CallToolResult:
        raise ToolError("This tool intentionally returns an error for testing")


def _add_tools_that_report(server: SandboxServer) -> None:
    async def log(ctx: AnyContext) -> CallToolResult:
        for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await ctx.session.send_log_message(level="info", data=words, related_request_id=ctx.request_id)
            await anyio.sleep(STEP_S)
        return answer(text("logged"))

    server.add_tool(log, name="test_tool_with_logging", description="Sends three log messages.")
    server.add_tool(log, name="test_logging_tool", description="Sends three log messages.")

    @server.tool(description="Reports progress three times.")
    async def test_tool_with_progress(ctx: AnyContext) -> CallToolResult:
        for progress in (0, 50, 100):
            await ctx.report_progress(progress, 100)
            await anyio.sleep(STEP_S)
        return answer(text("reported"))

    @server.tool(description="Ends its connection and goes on.")
    async def test_reconnection(ctx: AnyContext) -> CallToolResult:
        await ctx.close_sse_stream()
        await anyio.sleep(STEP_S)
        return answer(text("The client came back."))


def _add_tools_that_change_lists(server: SandboxServer) -> None:
    @server.tool(description="Says that the tools have changed.")
    async def test_trigger_tool_change(ctx: AnyContext) -> CallToolResult:
        await ctx.notify_tools_changed()
        return answer(text("changed"))

    @server.tool(description="Says that the prompts have changed.")
    async def test_trigger_prompt_change(ctx: AnyContext) -> CallToolResult:
        await ctx.notify_prompts_changed()
        return answer(text("changed"))


def _add_resources(server: SandboxServer) -> None:
    @server.resource("test://static-text", description="Text.", mime_type="text/plain")
    def static_text() -> str:
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", description="An image.", mime_type="image/png")
    def static_binary() -> bytes:
        return base64.b64decode(PNG)

    @server.resource("test://watched-resource", description="A resource to watch.", mime_type="text/plain")
    def watched() -> str:
        return "watched"

    @server.resource("test://template/{id}/data", description="Data by id.", mime_type="application/json")
    def template(id: str) -> str:  # noqa: A002 - the suite's name
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})

    async def complete(*_request: object) -> Completion:
        return Completion(values=[], total=0, has_more=False)

    server.completion()(complete)  # type: ignore[no-untyped-call]


def _add_prompts(server: SandboxServer) -> None:
    @server.prompt(description="A prompt without arguments.")
    def test_simple_prompt() -> list[Message]:
        return [UserMessage(text("This is a simple prompt for testing."))]

    @server.prompt(description="A prompt with two arguments.")
    def test_prompt_with_arguments(arg1: str, arg2: str) -> list[Message]:
        return [UserMessage(text(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"))]

    @server.prompt(description="A prompt with a resource.")
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:  # noqa: N803 - the suite's name
        content = embedded(resourceUri, "Embedded resource content for testing.")
        return [UserMessage(content), UserMessage(text("Please process the embedded resource above."))]

    @server.prompt(description="A prompt with an image.")
    def test_prompt_with_image() -> list[Message]:
        return [UserMessage(image()), UserMessage(text("Please analyze the image above."))]


def _add_legacy_methods(server: SandboxServer) -> None:
    """Add methods of 2025-11-25 that the product has no use for: it logs to stderr and its files are not watched."""

    async def accept(*_request: object) -> EmptyResult:
        return EmptyResult()

    for method, params in (
        ("logging/setLevel", SetLevelRequestParams),
        ("resources/subscribe", SubscribeRequestParams),
        ("resources/unsubscribe", UnsubscribeRequestParams),
    ):
        server._lowlevel_server.add_request_handler(method, params, accept)
