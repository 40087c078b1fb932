"""A real MCP client over stdio: create a sandbox, put data in, compute, draw, take the picture out.

    python examples/mcp_client.py [PNG]

Any MCP client does the same; this one uses the `mcp` package, which comes with mcp-sandbox.
"""

# ruff: noqa: T201 - an example may print

import base64
import os
import sys
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult, ImageContent, TextContent

SERVER = Path(sys.executable).with_name("mcp-sandbox")  # the console script of this environment
SALES = "month,units\n2026-01,120\n2026-02,135\n2026-03,128\n2026-04,160\n"
LOAD = """\
import pandas as pd
sales = pd.read_csv("sales.csv")
sales.units.sum()"""
DRAW = """\
import matplotlib.pyplot as plt
plt.bar(sales.month, sales.units)   # `sales` is still there from the run before
plt.title("Units sold")"""


async def call(client: Client, tool: str, **arguments: Any) -> CallToolResult:  # noqa: ANN401 - JSON
    """Call a tool; an error it reports ends the example."""
    result = await client.call_tool(tool, arguments)
    text = "\n".join(block.text for block in result.content if isinstance(block, TextContent))
    if result.is_error:
        raise SystemExit(f"{tool}: {text}")
    print(f"--- {tool}\n{text}\n")
    return result


async def main(target: Path) -> None:
    """The whole tour."""
    server = StdioServerParameters(command=str(SERVER), env=dict(os.environ))
    async with Client(server) as client:
        created = await call(client, "create_sandbox")
        box = (created.structured_content or {})["sandbox_id"]
        await call(client, "write_file", sandbox_id=box, path="sales.csv", content=SALES)
        await call(client, "run_code", sandbox_id=box, code=LOAD)
        drawn = await call(client, "run_code", sandbox_id=box, code=DRAW)
        picture = next(block for block in drawn.content if isinstance(block, ImageContent))
        target.write_bytes(base64.b64decode(picture.data))
        await call(client, "close_sandbox", sandbox_id=box)
    print(f"The chart is in {target}.")


anyio.run(main, Path(sys.argv[1] if len(sys.argv) > 1 else "chart.png"))
