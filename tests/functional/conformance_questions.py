"""Tools of the conformance suite that ask the client: by requests (2025-11-25) or in their result (2026-07-28)."""

import json
from collections.abc import Mapping
from typing import Any

from mcp.server.mcpserver.prompts.base import Message, UserMessage
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CallToolResult,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    SamplingMessage,
)

from mcp_sandbox.serving.server import SandboxServer
from tests.functional.conformance_content import AnyContext, answer, text

Properties = Mapping[str, Mapping[str, object]]

NAME: Properties = {"name": {"type": "string"}}
DEFAULTS: Properties = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    "verified": {"type": "boolean", "default": True},
}
VALUES = ["a", "b", "c"]
TITLED = [{"const": value, "title": value.upper()} for value in VALUES]
ENUMS: Properties = {
    "untitledSingle": {"type": "string", "enum": VALUES},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {"type": "string", "enum": VALUES, "enumNames": ["A", "B", "C"]},
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": VALUES}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}


def register(server: SandboxServer) -> None:
    """Add everything of this module to a server."""
    _add_requests(server)
    _add_single_questions(server)
    _add_states(server)
    _add_capability_checks(server)


def form(properties: Properties) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def ask_user(message: str, properties: Properties) -> ElicitRequest:
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=form(properties)))


def ask_model(prompt: str) -> CreateMessageRequest:
    message = SamplingMessage(role="user", content=text(prompt))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=100))


def need(questions: dict[str, InputRequest], state: str | None = None) -> InputRequiredResult:
    return InputRequiredResult(input_requests=questions, request_state=state)


def told(ctx: AnyContext, *names: str) -> bool:
    """Whether the client has answered these questions."""
    return set(names) <= (ctx.input_responses or {}).keys()


def said(ctx: AnyContext, name: str) -> str:
    """What the client answered."""
    return json.dumps((ctx.input_responses or {})[name].model_dump(mode="json", by_alias=True))


def _add_requests(server: SandboxServer) -> None:
    async def elicit(ctx: AnyContext, message: str, properties: Properties) -> CallToolResult:
        result = await ctx.session.elicit_form(message, form(properties), related_request_id=ctx.request_id)
        return answer(text(f"Elicitation completed: action={result.action}, content={json.dumps(result.content)}"))

    @server.tool(description="Asks the client's model.")
    async def test_sampling(ctx: AnyContext, prompt: str) -> CallToolResult:
        params = ask_model(prompt).params
        result = await ctx.session.create_message(
            messages=params.messages, max_tokens=params.max_tokens, related_request_id=ctx.request_id
        )
        return answer(text(f"LLM response: {result.content}"))

    @server.tool(description="Asks the user.")
    async def test_elicitation(ctx: AnyContext, message: str) -> CallToolResult:
        return await elicit(ctx, message, {"username": {"type": "string"}, "email": {"type": "string"}})

    @server.tool(description="Asks the user, with defaults.")
    async def test_elicitation_sep1034_defaults(ctx: AnyContext) -> CallToolResult:
        return await elicit(ctx, "Defaults", DEFAULTS)

    @server.tool(description="Asks the user to choose.")
    async def test_elicitation_sep1330_enums(ctx: AnyContext) -> CallToolResult:
        return await elicit(ctx, "Enums", ENUMS)


def _add_single_questions(server: SandboxServer) -> None:
    questions: dict[str, tuple[str, InputRequest]] = {
        "test_input_required_result_elicitation": ("user_name", ask_user("What is your name?", NAME)),
        "test_input_required_result_sampling": ("capital_question", ask_model("What is the capital of France?")),
        "test_input_required_result_list_roots": ("client_roots", ListRootsRequest()),
        "test_streaming_elicitation": ("user_name", ask_user("What is your name?", NAME)),
    }

    def add(tool: str, name: str, question: InputRequest) -> None:
        async def ask(ctx: AnyContext) -> CallToolResult | InputRequiredResult:
            return answer(text(f"The answer: {said(ctx, name)}")) if told(ctx, name) else need({name: question})

        server.add_tool(ask, name=tool, description="Asks one question.")

    for tool, (name, question) in questions.items():
        add(tool, name, question)

    @server.prompt(description="Asks a question.")
    async def test_input_required_result_prompt(ctx: AnyContext) -> list[Message] | InputRequiredResult:
        if told(ctx, "user_context"):
            return [UserMessage(text(f"Use this context: {said(ctx, 'user_context')}"))]
        question = ask_user("What context should the prompt use?", {"context": {"type": "string"}})
        return need({"user_context": question})


def _add_states(server: SandboxServer) -> None:
    confirm = ask_user("Please confirm", {"ok": {"type": "boolean"}})

    async def confirmed(ctx: AnyContext) -> CallToolResult | InputRequiredResult:
        if told(ctx, "confirm") and ctx.request_state == "asked":
            return answer(text("state-ok"))
        return need({"confirm": confirm}, "asked")

    for name in ("test_input_required_result_request_state", "test_input_required_result_tampered_state"):
        server.add_tool(confirmed, name=name, description="Asks, and keeps a state meanwhile.")

    @server.tool(description="Asks three questions at once.")
    async def test_input_required_result_multiple_inputs(ctx: AnyContext) -> CallToolResult | InputRequiredResult:
        if told(ctx, "user_name", "greeting", "client_roots"):
            return answer(text("All answered."))
        questions: dict[str, InputRequest] = {
            "user_name": ask_user("What is your name?", NAME),
            "greeting": ask_model("Generate a greeting"),
            "client_roots": ListRootsRequest(),
        }
        return need(questions, "asked")

    @server.tool(description="Asks two questions, one after the other.")
    async def test_input_required_result_multi_round(ctx: AnyContext) -> CallToolResult | InputRequiredResult:
        match ctx.request_state:
            case "second" if told(ctx, "step2"):
                return answer(text(f"The answer: {said(ctx, 'step2')}"))
            case "first" if told(ctx, "step1"):
                color = ask_user("Step 2: What is your favorite color?", {"color": {"type": "string"}})
                return need({"step2": color}, "second")
            case _:
                return need({"step1": ask_user("Step 1: What is your name?", NAME)}, "first")


def _add_capability_checks(server: SandboxServer) -> None:
    @server.tool(description="Asks only what the client can answer.")
    async def test_input_required_result_capabilities(ctx: AnyContext) -> InputRequiredResult:
        able = ctx.client_capabilities
        questions: dict[str, InputRequest] = {}
        if able is not None and able.sampling is not None:
            questions["model"] = ask_model("Say hello")
        if able is not None and able.elicitation is not None:
            questions["user"] = ask_user("What is your name?", NAME)
        return need(questions, "asked")

    @server.tool(description="Refuses clients without a model.")
    async def test_missing_capability(ctx: AnyContext) -> CallToolResult:
        able = ctx.client_capabilities
        if able is None or able.sampling is None:
            raise MCPError(
                MISSING_REQUIRED_CLIENT_CAPABILITY,
                "This tool needs sampling.",
                {"requiredCapabilities": {"sampling": {}}},
            )
        return answer(text("The client has a model."))
