"""An agent of pydantic-ai that uses mcp-sandbox over stdio.

The model is scripted, so the example needs no key: it calls run_code and repeats what that answers. Put a hosted model
in its place: `Agent("openai:…", …)`. Needs `pip install 'pydantic-ai-slim[mcp]'`.
"""

# ruff: noqa: T201 - an example may print

import asyncio
import os

from fastmcp.client.transports import StdioTransport
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

CODE = "sum(n * n for n in range(10))"


def scripted(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
    """Call run_code once, then answer with what the tool returned."""
    returned = [part for part in messages[-1].parts if isinstance(part, ToolReturnPart)]
    if returned:
        return ModelResponse(parts=[TextPart(f"The sandbox says: {returned[-1].content}")])
    return ModelResponse(parts=[ToolCallPart("run_code", {"code": CODE})])


async def main() -> None:
    # Without keep_alive=False the server would be killed with this process, and could not clean up.
    server = StdioTransport("mcp-sandbox", args=[], env=dict(os.environ), keep_alive=False)
    sandbox = MCPToolset(server, init_timeout=60)
    agent = Agent(FunctionModel(scripted), toolsets=[sandbox])
    async with agent:
        result = await agent.run("What is the sum of the first ten squares?")
    print(result.output)


if __name__ == "__main__":
    asyncio.run(main())
