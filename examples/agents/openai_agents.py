"""An agent of the OpenAI Agents SDK that uses mcp-sandbox over stdio.

The model is scripted, so the example needs no key: it calls run_code and repeats what that answers. Put a hosted model
in its place: `Agent(model="…")`. Needs `pip install openai-agents`.
"""

# ruff: noqa: A002, ANN401, ARG002, T201 - an example may print; the library's own signatures

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, Model, ModelResponse, Runner, Usage, set_tracing_disabled
from agents.mcp import MCPServerStdio
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseStreamEvent,
)

CODE = "sum(n * n for n in range(10))"


def text_of(output: Any) -> str:
    """What a tool returned: a text, or a list of texts and images."""
    return output if isinstance(output, str) else "\n".join(part.get("text", "") for part in output)


class ScriptedModel(Model):
    """Calls run_code once, then answers with what the tool returned."""

    async def get_response(self, system_instructions: str | None, input: Any, *rest: Any, **more: Any) -> ModelResponse:
        outputs = [item["output"] for item in input if item.get("type") == "function_call_output"] if input else []
        answer = self._answer(text_of(outputs[-1])) if outputs else self._call()
        return ModelResponse(output=[answer], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[ResponseStreamEvent]:
        raise NotImplementedError("this example does not stream")

    @staticmethod
    def _call() -> ResponseFunctionToolCall:
        arguments = json.dumps({"code": CODE})
        return ResponseFunctionToolCall(type="function_call", name="run_code", call_id="call-1", arguments=arguments)

    @staticmethod
    def _answer(text: str) -> ResponseOutputMessage:
        content = ResponseOutputText(type="output_text", text=f"The sandbox says: {text}", annotations=[])
        return ResponseOutputMessage(
            id="message-1", type="message", role="assistant", status="completed", content=[content]
        )


async def main() -> None:
    set_tracing_disabled(disabled=True)  # it would send traces to OpenAI
    command = {"command": "mcp-sandbox", "args": [], "env": dict(os.environ)}
    async with MCPServerStdio(command, client_session_timeout_seconds=60) as sandbox:
        agent = Agent("analyst", model=ScriptedModel(), mcp_servers=[sandbox])
        result = await Runner.run(agent, [{"role": "user", "content": "What is the sum of the first ten squares?"}])
    print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
