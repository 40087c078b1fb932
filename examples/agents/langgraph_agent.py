"""A LangGraph graph whose tools come from mcp-sandbox over stdio.

The model is scripted, so the example needs no key: it calls run_code and repeats what that answers. Put a hosted model
in its place: any chat model of LangChain, with `bind_tools(tools)`. Needs `pip install langgraph`; the tools are
converted here because langchain-mcp-adapters does not work with version 2 of the MCP SDK yet.
"""

# ruff: noqa: ANN401, T201 - an example may print; the library's own signatures

import asyncio
import os
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from mcp import Client, StdioServerParameters
from mcp_types import TextContent, Tool

CODE = "sum(n * n for n in range(10))"


def scripted(state: MessagesState) -> dict[str, list[AIMessage]]:
    """Call run_code once, then answer with what the tool returned."""
    last = state["messages"][-1]
    if isinstance(last, ToolMessage):
        return {"messages": [AIMessage(f"The sandbox says: {last.text}")]}
    call = {"name": "run_code", "args": {"code": CODE}, "id": "call-1"}
    return {"messages": [AIMessage("", tool_calls=[call])]}


def converted(client: Client, tool: Tool) -> StructuredTool:
    """Make a tool of the server one of LangChain's."""

    async def call(**arguments: Any) -> str:
        result = await client.call_tool(tool.name, arguments)
        return "\n".join(block.text for block in result.content if isinstance(block, TextContent))

    return StructuredTool(
        name=tool.name, description=tool.description or "", args_schema=tool.input_schema, coroutine=call
    )


async def main() -> None:
    server = StdioServerParameters(command="mcp-sandbox", args=[], env=dict(os.environ))
    async with Client(server) as client:
        tools = [converted(client, tool) for tool in (await client.list_tools()).tools]
        graph = StateGraph(MessagesState)
        graph.add_node("model", scripted)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        question = HumanMessage("What is the sum of the first ten squares?")
        result = await graph.compile().ainvoke({"messages": [question]})
    print(result["messages"][-1].text)


if __name__ == "__main__":
    asyncio.run(main())
